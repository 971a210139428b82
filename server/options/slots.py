"""The options of slots: of the only pool, or of each of several, written `--pool snapstream:slots=32`."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, ClassVar

from pydantic import Field

from backends.config import DEFAULT_DISK_BYTES
from backends.options import Bytes, Count, CountOrZero, Folder, OptionGroup, Shown, Text, Tokens
from cache.policy import PolicyName
from cache.policy_options import LayerBudgets, PolicyOptions, SelectionName
from cache.pool_options import KVCacheDtype, PoolOptions, check_names
from cache.scorer import HeadReduction, Pooling, QueryReduction, SoftmaxDomain, WindowScorer
from server.options.command_line import OptionError, options_of, validated
from server.options.settings import PrefixSharing

_SHORT = {
    "slots": "num-slots",
    "capacity": "slot-capacity",
    "sink": "num-sink",
    "recent": "num-recent",
    "kept": "num-kept",
    "attended": "num-attended",
}
_HALF = Shown(default="half of the rest")


_Distance = Annotated[int, Field(ge=0), Shown("TOKENS")]
_Share = Annotated[float, Field(ge=0, le=1), Shown("SHARE", expected="a number from 0 to 1")]


class SelectionOptions(OptionGroup):
    """The numbers of a selection, for research. None is the selection's own.

    They are keys of `--selection-options` and of `--pool`, and flags, as they were before there were
    selections.
    """

    title: ClassVar[str] = "Selection"
    is_hidden: ClassVar[bool] = True

    observation_window: Tokens | None = None
    """Tokens at a prompt's end whose attention scores the others."""
    observation_half_life: _Distance | None = None
    """Distance from the prompt's end at which such a token's vote counts half; 0: all count alike."""
    least_vote: _Share | None = None
    """What the vote of a token counts at least, however far it is from the prompt's end."""
    softmax_domain: SoftmaxDomain | None = None
    """Keys over which the scoring attention is normalised."""
    query_reduction: QueryReduction | None = None
    """How the scores of the observing tokens are reduced to one."""
    pooling: Pooling | None = None
    """How neighbouring scores are smoothed."""
    pooling_size: Tokens | None = None
    """Tokens over which they are smoothed; odd."""
    pooling_shift: _Distance | None = None
    """Tokens by which the smoothing is shifted, so that what follows a high score is kept."""
    pooling_half_life: _Distance | None = None
    """Tokens of distance at which a score counts half in its neighbours'; 0: all alike."""
    head_reduction: HeadReduction | None = None
    """How the scores of a KV head's query heads are reduced to one."""
    selection_chunk: Tokens | None = None
    """Neighbouring tokens that are kept or dropped together."""
    num_echoed: Annotated[CountOrZero | None, Shown("TOKENS")] = None
    """Tokens of the question (the first paragraph of the last user message, or of a raw prompt) that are read
    again behind a long prompt, to score its tokens too."""
    lend_ring: bool | None = None
    """Let three quarters of the ring hold more of a long prompt's best tokens instead of its newest, until
    the answer comes."""
    layer_budgets: LayerBudgets | None = None
    """How the layers share all kept entries: equally, or by each layer's induction score."""
    share_votes: bool | None = None
    """Let the layers behind the one with the highest induction score use its scores too."""

    def applied_to(self, policy: PolicyOptions) -> PolicyOptions:
        """Return the policy with these numbers. Raises ValueError.

        A policy without a scorer has no use for a scorer's numbers.
        """
        chosen = {key: value for key, value in self if value is not None}
        numbers = {key: chosen.pop(key) for key in WindowScorer.__dataclass_fields__ if key in chosen}
        if policy.scorer is not None:
            chosen["scorer"] = replace(policy.scorer, **numbers)
        return replace(policy, **chosen)


class SlotOptions(OptionGroup):
    """The slots of one pool. None is the policy's own value."""

    title: ClassVar[str] = "Slots"

    num_slots: Count = 8
    """Slots: sequences that are generated at once."""
    policy: PolicyName = PolicyName.SNAPSTREAM
    """What a slot holds of its sequence."""
    slot_capacity: Annotated[
        Count | None,
        Shown(
            default="the sum of the sizes given; else for snapstream what fits in memory, for full and "
            "sparse the longest sequence, for other policies and for models demo and smollm2 2048"
        ),
    ] = None
    """Entries of a slot."""
    num_sink: Annotated[CountOrZero | None, Shown(default="4")] = None
    """Entries for a sequence's first tokens."""
    num_recent: Annotated[Count | None, _HALF] = None
    """Entries for its newest tokens."""
    num_kept: Annotated[CountOrZero | None, _HALF] = None
    """Entries for the prompt's best tokens."""
    num_attended: Annotated[
        Count | None, Shown(default="for sparse a 32nd of its capacity, at least 128")
    ] = None
    """Tokens older than the ring that a step of policy sparse attends to."""
    lend_kept: Annotated[bool | None, Shown(default="yes; no for other policies than snapstream")] = None
    """Let the ring use kept entries that a prompt leaves free: a slot then holds all of a sequence that fits
    it."""
    kv_cache_dtype: KVCacheDtype = KVCacheDtype.AUTO
    """Type of a slot's keys and values: auto is the model's; int8, and fp8 on a GPU, take 0.52 of the memory
    of bfloat16 (serve.md)."""
    selection: SelectionName = SelectionName.DEFAULT
    """How policies snapstream and snapkv choose the tokens that they keep: as published, or by the policy's
    own default (selection.md)."""
    selection_options: Annotated[tuple[Text, ...], Shown("KEY=VALUE,…", is_joined=True)] = ()
    """Single numbers of the selection, for research (selection.md)."""

    def pool(self, name: str, numbers: SelectionOptions, max_model_len: int) -> PoolOptions:
        """Raise ValueError that names a field, for options that are invalid with every model."""
        policy = PolicyOptions(
            name=self.policy,
            slot_capacity=self.slot_capacity,
            num_sink=self.num_sink,
            num_recent=self.num_recent,
            num_kept=self.num_kept,
            num_attended=self.num_attended,
            lend_kept=self.lend_kept,
        )
        policy = numbers.applied_to(policy.with_selection(self.selection))
        # A model can only shorten `max_model_len`: an error here is one with every model.
        policy.resolve(max_model_len)
        return PoolOptions(self.num_slots, policy, name, self.kv_cache_dtype)


def read_pools(
    slots: SlotOptions, numbers: SelectionOptions, pools: tuple[str, ...], max_model_len: int | None
) -> tuple[PoolOptions, ...]:
    """Return the pools of `--pool`, or the only one. `numbers` are those of flags.

    Raises `OptionError`, or ValueError that names a field.
    """
    longest = max_model_len or sys.maxsize  # the model's limit, which is not known yet
    if not pools:
        return (slots.pool("", _with_written(numbers, slots.selection_options), longest),)
    for group in (slots, numbers):
        for option in options_of(type(group)):
            if getattr(group, option.key) != option.field.default:
                raise OptionError(
                    f"{option.flag} describes the slots of a single pool; with --pool, it is one of "
                    "the pool's keys"
                )
    read = tuple(_read_pool(written, longest) for written in pools)
    try:
        check_names(read)
    except ValueError as error:
        raise OptionError(f"--pool: {error}; choose others by the key name") from error
    return read


def _with_written(numbers: SelectionOptions, written: tuple[str, ...]) -> SelectionOptions:
    """Return the numbers with those of `--selection-options`. Raises `OptionError`."""
    flag = "--selection-options"
    options = {option.name: option for option in options_of(SelectionOptions)}
    values = numbers.model_dump(exclude_none=True)
    sources = {}
    for name, value in _pairs(f"{flag} {','.join(written)}", written, "pooling=maximum").items():
        option = options.get(name)
        if option is None:
            raise OptionError(f"{flag}: there is no key {name!r}; the keys are {', '.join(options)}")
        if option.key in values:
            raise OptionError(f"{flag}: {option.flag} gives {name!r} too: remove one of them")
        values[option.key] = value
        sources[option.key] = f"{name} of {flag}"
    return validated(SelectionOptions, values, sources)


def _read_pool(written: str, max_model_len: int) -> PoolOptions:
    policy, _, rest = written.partition(":")
    pairs = _pairs(f"--pool {written}", rest.split(","), "slots=8")
    name = pairs.pop("name", "")
    known = {option.name: option.key for option in options_of(SlotOptions) if not option.is_list}
    numbers = {option.name: option.key for option in options_of(SelectionOptions)}
    values = {"policy": policy}
    sources = {"policy": f"policy of --pool {written}"}
    for word, value in pairs.items():
        key = (known | numbers).get(_SHORT.get(word, word))
        if key is None:
            keys = ", ".join((*_SHORT, *(name for name in known if name not in _SHORT.values()), *numbers))
            raise OptionError(f"--pool {written}: there is no key {word!r}; the keys are name, {keys}")
        values[key] = value
        sources[key] = f"{word} of --pool {written}"
    own = {key: values.pop(key) for key in numbers.values() if key in values}
    slots = validated(SlotOptions, values, sources)
    try:
        return slots.pool(name, validated(SelectionOptions, own, sources), max_model_len)
    except ValueError as error:
        raise OptionError(f"--pool {written}: {error}") from error


def _pairs(source: str, items: Sequence[str], example: str) -> dict[str, str]:
    """Return the keys and values of an option that is named by `source`. Raises `OptionError`."""
    pairs: dict[str, str] = {}
    for item in filter(None, items):
        key, _, value = item.partition("=")
        if not value:
            raise OptionError(f"{source}: {key!r} must have a value, as in {example}")
        if key in pairs:
            raise OptionError(f"{source}: {key!r} is given more than once")
        pairs[key] = value
    return pairs


class CacheOptions(OptionGroup):
    """Several pools, and how prompts are read."""

    title: ClassVar[str] = "Cache"

    pool: Annotated[
        tuple[Text, ...],
        Shown("POLICY[:KEY=VALUE,…]", default="one, of the options for slots", separator=" "),
        Field(
            description="Several pools instead of one: the policy of each, and by their names any of the "
            f"options for slots (short: {', '.join(f'`{short}`' for short in _SHORT)}) and of the keys of "
            "`--selection-options`; `name` if two have one policy. In the variable separated by spaces."
        ),
    ] = ()
    num_scratch: Count = 2
    """Prompts that are read at once of those that sinks and ring do not hold."""
    scratch_capacity: Annotated[Count | None, Shown(default="all")] = None
    """Tokens of a prompt that are held while it is read; of a longer one, those with the lowest scores are
    evicted on the way."""
    prefill_chunk: Tokens = 512
    """Prompt tokens read in one step."""
    prefix_cache_bytes: Annotated[
        CountOrZero | None, Shown("BYTES", default="a tenth of what is available, at most 4 GiB")
    ] = None
    """Host memory for keys and values of prompts, so that later prompts with the same beginning need not read
    it again; 0 for none."""
    prefix_cache_dtype: KVCacheDtype = KVCacheDtype.AUTO
    """Type in which they are stored. In 8 bits about twice as many fit, and a restored prompt is rounded."""
    prefix_cache_dir: Annotated[Folder | None, Shown("DIR", default="none: they are lost at the end")] = None
    """Folder for stored prompts, which a restarted server and others of this host find again."""
    prefix_cache_disk_bytes: Bytes = DEFAULT_DISK_BYTES
    """Most bytes of stored prompts in it."""
    prefix_sharing: PrefixSharing = PrefixSharing.KEY
    """Which requests share stored prompts: those of one API key, or all."""
