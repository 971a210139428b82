"""The model or server that an evaluation measures, and the options of an engine started for a setting."""

import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from commands.eval.completer import Completer, Completion, first_model, http_client
from commands.eval.engine import engine
from commands.eval.errors import EvalError
from commands.eval.options import EVAL_MODEL, ServedOptions
from commands.eval.prompts import TokenPrompt, load_tokenizer
from commands.eval.setting import Setting, model_id, serve_config, settings_of, split_options
from commands.shared.progress import ProgressLine
from server.options.command_line import OptionError
from server.options.models import named_model
from server.text.tokenizer import Tokenizer

EMBEDDED = {EVAL_MODEL.name: str(EVAL_MODEL)}
_GREEDY: Mapping[str, float] = {}


@dataclass(frozen=True, slots=True)
class Target:
    """Engines that are started with `model`, or the running server at `base_url`.

    A slot has `length` / compression entries.
    """

    model: str
    length: int
    concurrency: int
    serve_options: tuple[str, ...] = ()
    base_url: str | None = None
    api_key: str | None = None
    served_model_name: str | None = None
    tokenizer: str | None = None

    def load_tokenizer(self) -> Tokenizer:
        """Read the model's tokenizer. A running server's tokenizer is found by its model's name.

        Raises `EvalError`.
        """
        if self.tokenizer is not None or self.base_url is None:
            return load_tokenizer(self.tokenizer or self.model)
        name = self.served_model_name or asyncio.run(_first_model(self.base_url, self.api_key))
        try:
            return load_tokenizer(EMBEDDED.get(name) or named_model(name) or name)
        except EvalError as error:
            raise EvalError(f"{error}: name one by --tokenizer") from error

    def options(self, setting: Setting, prompts: Sequence[TokenPrompt]) -> tuple[str, ...]:
        """Return the options of an engine for a setting, without the model. A running server needs none.

        Raises `OptionError` for options that do not fit together.
        """
        if self.base_url is not None:
            return ()
        base = (*self.serve_options, "--num-slots", str(self.concurrency))
        num_decoded = max(prompt.num_decoded for prompt in prompts)
        slots = setting.slot_options(self.length, num_decoded, setting.observation_window(base))
        max_model_len = max(len(prompt.token_ids) + prompt.max_tokens for prompt in prompts)
        options = (*base, *slots, "--max-model-len", str(max_model_len))
        setting.check(options, self.length)
        return options

    async def complete(
        self,
        setting: Setting,
        options: Sequence[str],
        prompts: Sequence[TokenPrompt],
        samplings: Sequence[Mapping[str, float]] | None = None,
    ) -> tuple[str, list[Completion]]:
        """Return the model's name and an answer for each prompt.

        `samplings` has the sampling fields of each request. None is greedy. Raises `EvalError`.
        """
        if self.base_url is not None:
            return await self._complete(self.base_url, setting, prompts, samplings)
        async with engine(("--model", self.model, *options)) as base_url:
            _, completions = await self._complete(base_url, setting, prompts, samplings)
            return self.model, completions

    async def _complete(
        self,
        base_url: str,
        setting: Setting,
        prompts: Sequence[TokenPrompt],
        samplings: Sequence[Mapping[str, float]] | None,
    ) -> tuple[str, list[Completion]]:
        progress = ProgressLine(sys.stderr, setting.label, len(prompts))
        limit = asyncio.Semaphore(self.concurrency)
        try:
            async with http_client(self.api_key) as http:
                completer = await Completer.open(http, base_url, self.served_model_name, setting.pool)

                async def complete(prompt: TokenPrompt, sampling: Mapping[str, float]) -> Completion:
                    async with limit:
                        completion = await completer.complete(prompt, sampling)
                    progress(True)
                    return completion

                async with asyncio.TaskGroup() as group:
                    pairs = zip(prompts, samplings or [_GREEDY] * len(prompts), strict=True)
                    tasks = [group.create_task(complete(*pair)) for pair in pairs]
                return completer.model, [task.result() for task in tasks]
        except* EvalError as errors:
            raise EvalError(f"{setting.label}: {errors.exceptions[0]}") from None
        finally:
            progress.close()


async def _first_model(base_url: str, api_key: str | None) -> str:
    async with http_client(api_key) as http:
        return await first_model(http, base_url)


def target_of(served: ServedOptions, length: int) -> tuple[Target, list[Setting]]:
    """Return the target and the settings to measure. With --base-url, a setting is a pool of that server.

    Raises `OptionError`.
    """
    base_url = served.base_url
    if base_url is not None:
        if served.serve_options:
            raise OptionError("--serve-options does not go with --base-url: that server is already running")
        slots = {"policy": served.policy, "compression": served.compression, "control": served.control}
        if unused := [f"--{name}" for name, value in slots.items() if value]:
            print(
                f"{', '.join(unused)}: of no effect on {base_url}, whose slots are fixed; "
                "--cache-policy selects one of its pools",
                file=sys.stderr,
            )
    elif served.pool:
        raise OptionError("--cache-policy needs the --base-url of a server with these pools")
    target = Target(
        model=served.model,
        length=length,
        concurrency=served.concurrency,
        serve_options=split_options(served.serve_options),
        base_url=base_url,
        api_key=served.api_key,
        served_model_name=served.served_model_name,
        tokenizer=served.tokenizer,
    )
    serve_config(("--model", target.model, *target.serve_options))
    if base_url is not None:
        return target, [Setting(None, pool=pool) for pool in dict.fromkeys(served.pool or (None,))]
    return target, settings_of(served.policy, served.compression, served.control)


def shown_model(target: Target, model: str) -> str:
    """Return the model's name in results."""
    return model_id(model) if target.base_url is None else model
