"""The options of simulated serving, and the mark that says of every answer that its times are simulated."""

import enum
from collections.abc import Callable, Mapping
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from backends.sn40l.backend import SimulationConfig
from backends.sn40l.hardware import load_machine, machine_names
from backends.sn40l.model_config import load_model, model_names
from backends.timed import parse_fault
from server.options.option import Option, OptionError, OptionGroup, choices, integer, switch

HEADER = "x-simulated"


class InnerName(enum.StrEnum):
    """Whose tokens a simulated backend answers with."""

    TORCH = "torch"
    FAKE = "fake"


def _inner(value: str) -> InnerName:
    if value not in list(InnerName):
        raise ValueError(f"one of {', '.join(InnerName)}")
    return InnerName(value)


def _that_leads_to(load: Callable[[str], object], kind: str, file: str) -> Callable[[str], str]:
    """Return the parser of names and paths that `load` takes."""

    def parse(value: str) -> str:
        try:
            load(value)
        except OSError as error:
            raise ValueError(f"{file} that can be read ({error.strerror})") from error
        except ValueError as error:
            raise ValueError(f"{kind} ({error})") from error
        return value

    return parse


model_name = _that_leads_to(load_model, "a model", "a config.json")
machine_name = _that_leads_to(load_machine, "a machine", "a .toml file")
MODEL_TEXT = f"Model that is timed: a config.json, its folder, or {', '.join(model_names())}."
MACHINE_TEXT = f"Machine that is timed: a .toml file, or {', '.join(machine_names())}."


def _time_scale(value: str) -> float | None:
    """Return how many times as fast as it would time passes; None for no waiting at all."""
    if value == "virtual":
        return None
    try:
        scale = float(value)
    except ValueError:
        scale = 0.0
    if not 0 < scale < float("inf"):
        raise ValueError("a number above 0, or virtual")
    return scale


_DEFAULT = SimulationConfig()

SIMULATION = OptionGroup(
    "Simulation (`--backend sn40l`)",
    (
        Option("inner", _inner, InnerName.TORCH, "What the tokens come from.", choices(InnerName)),
        Option("simulate-model", model_name, _DEFAULT.model, MODEL_TEXT, "MODEL"),
        Option("simulate-machine", machine_name, _DEFAULT.machine, MACHINE_TEXT, "MACHINE"),
        Option("sockets", integer(1), _DEFAULT.num_sockets, "Sockets of the machine.", "N"),
        Option("looping", switch, _DEFAULT.loops, "Whether the kernels of all layers are one loop.", ""),
        Option(
            "time-scale",
            _time_scale,
            1.0,
            "How many times as fast simulated time passes; virtual for no waiting.",
            "FACTOR|virtual",
        ),
        Option(
            "fault",
            parse_fault,
            (),
            "Faults: slow-socket=FACTOR, stalled-link=EVERY:SECONDS, failed-step=EVERY.",
            "FAULT",
            "none",
            is_list=True,
        ),
    ),
)


def simulation_of(values: Mapping[str, Any]) -> SimulationConfig:
    """Return what the options of the group say. Raises `OptionError` for more sockets than the machine has."""
    most = load_machine(values["simulate_machine"]).max_sockets
    if values["sockets"] > most:
        raise OptionError(f"--sockets must be from 1 to {most}, got {values['sockets']}")
    return SimulationConfig(
        model=values["simulate_model"],
        machine=values["simulate_machine"],
        num_sockets=values["sockets"],
        loops=values["looping"],
        time_scale=values["time_scale"],
        faults=values["fault"],
    )


class SimulatedMark:
    """Middleware that marks every answer, errors too: with `x-simulated: true`, and JSON objects with `"simulated": true`.

    So it does with the events of streams. Clients of the OpenAI API keep or overlook members that they do not know. The description of
    the API itself is none of its answers.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, _MarkedSend(send, marks_bodies=scope.get("path") != "/openapi.json"))


class _MarkedSend:
    """Sends one answer's messages, marked. The start of a JSON body waits for the body, which its length is that of."""

    def __init__(self, send: Send, *, marks_bodies: bool) -> None:
        self._send, self._marks_bodies = send, marks_bodies
        self._start: Message | None = None
        self._is_stream = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers[HEADER] = "true"
            kind = headers.get("content-type", "") if self._marks_bodies else ""
            self._is_stream = kind.startswith("text/event-stream")
            if kind.startswith("application/json"):
                self._start = message
                return
        elif self._start is not None:
            message = await self._send_start(self._start, message)
        elif self._is_stream:
            name, prefix, payload = message.get("body", b"").partition(b"data: ")
            message = {**message, "body": name + prefix + _marked(payload)}
        await self._send(message)

    async def _send_start(self, start: Message, body: Message) -> Message:
        """Send the start that waited, and return the body with its mark."""
        self._start = None
        marked = _marked(body.get("body", b""))
        headers = MutableHeaders(scope=start)
        if "content-length" in headers:
            headers["content-length"] = str(
                int(headers["content-length"]) + len(marked) - len(body.get("body", b""))
            )
        await self._send(start)
        return {**body, "body": marked}


def _marked(body: bytes) -> bytes:
    """Return a JSON object with one more member; what is none stays as it is."""
    return b'{"simulated":true,' + body[1:] if body.startswith(b'{"') else body
