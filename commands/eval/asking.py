"""Many prompts asked of one server, with progress; and the options of the engine that a setting wants for them."""

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
from server.options.serve import DEMO_MODEL, DEMO_MODEL_NAME
from server.text.tokenizer import Tokenizer

EMBEDDED = {DEMO_MODEL_NAME: str(DEMO_MODEL), EVAL_MODEL.name: str(EVAL_MODEL)}
_GREEDY: Mapping[str, float] = {}


@dataclass(frozen=True, slots=True)
class Asked:
    """Who is asked: engines started on `model`, or the server at `base_url`. `length` is what a compression divides."""

    model: str
    length: int
    concurrency: int
    serve_options: tuple[str, ...] = ()
    base_url: str | None = None
    api_key: str | None = None
    served_model_name: str | None = None
    tokenizer: str | None = None

    def load_tokenizer(self) -> Tokenizer:
        """Read the tokenizer of the model that is asked; a server's model is known by its name. Raises `EvalError`."""
        if self.tokenizer is not None or self.base_url is None:
            return load_tokenizer(self.tokenizer or self.model)
        name = self.served_model_name or asyncio.run(_first_model(self.base_url, self.api_key))
        try:
            return load_tokenizer(EMBEDDED.get(name, name))
        except EvalError as error:
            raise EvalError(f"{error}: name one by --tokenizer") from error

    def options(self, setting: Setting, prompts: Sequence[TokenPrompt]) -> tuple[str, ...]:
        """Return the options of the engine for a setting, but for the model; none for a server that is there. Raises `OptionError`."""
        if self.base_url is not None:
            return ()
        base = (*self.serve_options, "--num-slots", str(self.concurrency))
        scorer = serve_config(base).backend.config.pools[0].policy.scorer
        window = 0 if scorer is None else scorer.observation_window
        slots = setting.slot_options(self.length, max(prompt.num_decoded for prompt in prompts), window)
        longest = max(len(prompt.token_ids) + prompt.max_tokens for prompt in prompts)
        options = (*base, *slots, "--max-model-len", str(longest))
        setting.check(options, self.length)  # what cannot be is said before anything is measured
        return options

    async def ask(
        self,
        setting: Setting,
        options: Sequence[str],
        prompts: Sequence[TokenPrompt],
        samplings: Sequence[Mapping[str, float]] | None = None,
    ) -> tuple[str, list[Completion]]:
        """Return the model's name and an answer a prompt, each drawn with its sampling (none: greedily). Raises `EvalError`."""
        if self.base_url is not None:
            return await self._ask(self.base_url, setting, prompts, samplings)
        async with engine(("--model", self.model, *options)) as base_url:
            return self.model, (await self._ask(base_url, setting, prompts, samplings))[1]

    async def _ask(
        self,
        base_url: str,
        setting: Setting,
        prompts: Sequence[TokenPrompt],
        samplings: Sequence[Mapping[str, float]] | None,
    ) -> tuple[str, list[Completion]]:
        progress = ProgressLine(sys.stderr, setting.label, len(prompts))
        places = asyncio.Semaphore(self.concurrency)
        try:
            async with http_client(self.api_key) as http:
                completer = await Completer.open(http, base_url, self.served_model_name, setting.pool)

                async def complete(prompt: TokenPrompt, sampling: Mapping[str, float]) -> Completion:
                    async with places:
                        completion = await completer.complete(prompt, sampling)
                    progress(True)
                    return completion

                async with asyncio.TaskGroup() as group:
                    pairs = zip(prompts, samplings or [_GREEDY] * len(prompts), strict=True)
                    asked = [group.create_task(complete(*pair)) for pair in pairs]
                return completer.model, [task.result() for task in asked]
        except* EvalError as errors:
            raise EvalError(f"{setting.label}: {errors.exceptions[0]}") from None
        finally:
            progress.close()


async def _first_model(base_url: str, api_key: str | None) -> str:
    async with http_client(api_key) as http:
        return await first_model(http, base_url)


def asked_of(served: ServedOptions, length: int) -> tuple[Asked, list[Setting]]:
    """Return who is asked and the settings that are measured; with --base-url, the pools there. Raises `OptionError`."""
    base_url = served.base_url
    if base_url is not None:
        if served.serve_options:
            raise OptionError(
                "--serve-options does not go with --base-url: the server there has been started"
            )
        chosen = {"policy": served.policy, "compression": served.compression, "control": served.control}
        if unused := [f"--{name}" for name, value in chosen.items() if value]:
            print(
                f"{', '.join(unused)}: of no effect on {base_url}, whose slots are what they are; "
                "--cache-policy chooses one of its pools",
                file=sys.stderr,
            )
    elif served.pool:
        raise OptionError("--cache-policy needs the --base-url of the server that has such pools")
    asked = Asked(
        model=served.model,
        length=length,
        concurrency=served.concurrency,
        serve_options=split_options(served.serve_options),
        base_url=base_url,
        api_key=served.api_key,
        served_model_name=served.served_model_name,
        tokenizer=served.tokenizer,
    )
    serve_config(("--model", asked.model, *asked.serve_options))
    if base_url is not None:
        return asked, [Setting(None, pool=pool) for pool in dict.fromkeys(served.pool or (None,))]
    return asked, settings_of(served.policy, served.compression, served.control)


def shown_model(asked: Asked, model: str) -> str:
    """Return what results call the model that answered."""
    return model_id(model) if asked.base_url is None else model
