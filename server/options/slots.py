"""The options of slots: of the only pool, or of each of several, written `--pool snapstream:slots=32`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, ClassVar

from pydantic import Field

from backends.config import DEFAULT_MAX_MODEL_LEN
from backends.options import Count, CountOrZero, OptionGroup, Shown, Text, Tokens
from cache.policy import PolicyName
from cache.policy_options import DEFAULT_SCORERS, LayerBudgets, PolicyOptions
from cache.pool_options import PoolOptions, check_names
from cache.scorer import HeadReduction, Pooling, QueryReduction, SoftmaxDomain, WindowScorer
from server.options.command_line import OptionError, options_of, validated

_SHORT = {
    "slots": "num-slots",
    "capacity": "slot-capacity",
    "sink": "num-sink",
    "recent": "num-recent",
    "kept": "num-kept",
}
_HALF = Shown(default="half of the rest")


def _scorer_default(name: str) -> Shown:
    """Return the default of an option of the scorer, which depends on the policy."""
    snapstream, snapkv = (
        str(getattr(DEFAULT_SCORERS[policy], name)) for policy in (PolicyName.SNAPSTREAM, PolicyName.SNAPKV)
    )
    return Shown(default=snapstream if snapstream == snapkv else f"{snapstream}; {snapkv} for policy snapkv")


_Distance = Annotated[int, Field(ge=0), Shown("TOKENS")]


class SlotOptions(OptionGroup):
    """The slots of one pool. None is the policy's own value."""

    title: ClassVar[str] = "Slots"

    num_slots: Count = 8
    """Slots: sequences that are generated at once."""
    policy: PolicyName = PolicyName.SNAPSTREAM
    """What a slot holds of its sequence."""
    slot_capacity: Annotated[
        Count | None,
        Shown(default="2048, or the sum of the sizes given; with policy full the longest sequence"),
    ] = None
    """Entries of a slot."""
    num_sink: Annotated[CountOrZero | None, Shown(default="4")] = None
    """Entries for a sequence's first tokens."""
    num_recent: Annotated[Count | None, _HALF] = None
    """Entries for its newest tokens."""
    num_kept: Annotated[CountOrZero | None, _HALF] = None
    """Entries for the prompt's best tokens."""
    observation_window: Annotated[Tokens | None, _scorer_default("observation_window")] = None
    """Tokens at a prompt's end whose attention scores the others."""
    observation_half_life: Annotated[_Distance | None, _scorer_default("observation_half_life")] = None
    """Distance from the prompt's end at which such a token's vote counts half; 0: all count alike."""
    least_vote: Annotated[
        Annotated[float, Field(ge=0, le=1), Shown("SHARE", expected="a number from 0 to 1")] | None,
        _scorer_default("least_vote"),
    ] = None
    """What the vote of a token counts at least, however far it is from the prompt's end."""
    softmax_domain: Annotated[SoftmaxDomain | None, _scorer_default("softmax_domain")] = None
    """Keys over which the scoring attention is normalised."""
    query_reduction: Annotated[QueryReduction | None, _scorer_default("query_reduction")] = None
    """How the scores of the observing tokens are reduced to one."""
    pooling: Annotated[Pooling | None, _scorer_default("pooling")] = None
    """How neighbouring scores are smoothed."""
    pooling_size: Annotated[Tokens | None, _scorer_default("pooling_size")] = None
    """Tokens over which they are smoothed; odd."""
    pooling_shift: Annotated[_Distance | None, _scorer_default("pooling_shift")] = None
    """Tokens by which the smoothing is shifted, so that what follows a high score is kept."""
    pooling_half_life: Annotated[_Distance | None, _scorer_default("pooling_half_life")] = None
    """Tokens of distance at which a score counts half in its neighbours'; 0: all alike."""
    head_reduction: Annotated[HeadReduction | None, _scorer_default("head_reduction")] = None
    """How the scores of a KV head's query heads are reduced to one."""
    selection_chunk: Annotated[Tokens | None, _scorer_default("selection_chunk")] = None
    """Neighbouring tokens that are kept or dropped together."""
    num_echoed: Annotated[CountOrZero | None, _scorer_default("num_echoed"), Shown("TOKENS")] = None
    """Tokens of the question (the last user message, or a raw prompt) that are read again behind a long
    prompt, to score its tokens too."""
    lend_kept: Annotated[bool | None, Shown(default="yes; no for other policies than snapstream")] = None
    """Let the ring use kept entries that a prompt leaves free: a slot then holds all of a sequence that fits
    it."""
    lend_ring: Annotated[bool | None, Shown(default="yes; no for other policies than snapstream")] = None
    """Let three quarters of the ring hold more of a long prompt's best tokens instead of its newest, until
    the answer comes."""
    layer_budgets: Annotated[
        LayerBudgets | None, Shown(default="measured; equal for other policies than snapstream")
    ] = None
    """How the layers share all kept entries: equally, or by each layer's induction score."""
    share_votes: Annotated[bool | None, Shown(default="yes where layer-budgets is measured")] = None
    """Let the layers behind the one with the highest induction score use its scores too."""

    def pool(self, name: str, max_model_len: int) -> PoolOptions:
        """Raise ValueError that names a field, for options that are invalid with every model."""
        policy = PolicyOptions(
            name=self.policy,
            slot_capacity=self.slot_capacity,
            num_sink=self.num_sink,
            num_recent=self.num_recent,
            num_kept=self.num_kept,
            scorer=self._scorer(),
            lend_kept=self.lend_kept,
            lend_ring=self.lend_ring,
            layer_budgets=self.layer_budgets,
            share_votes=self.share_votes,
        )
        # A model can only shorten `max_model_len`: an error here is one with every model.
        policy.resolve(max_model_len)
        return PoolOptions(self.num_slots, policy, name)

    def _scorer(self) -> WindowScorer | None:
        default = DEFAULT_SCORERS.get(self.policy)
        if default is None:
            return None
        chosen = {name: getattr(self, name) for name in WindowScorer.__dataclass_fields__}
        return replace(default, **{name: value for name, value in chosen.items() if value is not None})


def read_pools(
    slots: SlotOptions, pools: tuple[str, ...], max_model_len: int | None
) -> tuple[PoolOptions, ...]:
    """Return the pools of `--pool`, or the only one.

    Raises `OptionError`, or ValueError that names a field.
    """
    longest = max_model_len or DEFAULT_MAX_MODEL_LEN
    if not pools:
        return (slots.pool("", longest),)
    for option in options_of(SlotOptions):
        if getattr(slots, option.key) != option.field.default:
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


def _read_pool(written: str, max_model_len: int) -> PoolOptions:
    policy, _, rest = written.partition(":")
    pairs = {"policy": policy, **_pairs(written, rest)}
    name = pairs.pop("name", "")
    keys = {option.name: option.key for option in options_of(SlotOptions)}
    values = {}
    sources = {}
    for word, value in pairs.items():
        key = keys.get(_SHORT.get(word, word))
        if key is None:
            known = ", ".join((*_SHORT, *(name for name in keys if name not in _SHORT.values())))
            raise OptionError(f"--pool {written}: there is no key {word!r}; the keys are name, {known}")
        values[key] = value
        sources[key] = f"{word} of --pool {written}"
    slots = validated(SlotOptions, values, sources)
    try:
        return slots.pool(name, max_model_len)
    except ValueError as error:
        raise OptionError(f"--pool {written}: {error}") from error


def _pairs(written: str, rest: str) -> Mapping[str, str]:
    pairs: dict[str, str] = {}
    for item in filter(None, rest.split(",")):
        key, _, value = item.partition("=")
        if not value:
            raise OptionError(f"--pool {written}: {key!r} must have a value, as in slots=8")
        if key in pairs:
            raise OptionError(f"--pool {written}: {key!r} is given more than once")
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
            f"options for slots (short: {', '.join(f'`{short}`' for short in _SHORT)}); `name` if two have "
            "one policy. In the variable separated by spaces."
        ),
    ] = ()
    num_scratch: Count = 2
    """Prompts longer than a slot that are read at once."""
    scratch_capacity: Annotated[Count | None, Shown(default="all")] = None
    """Tokens of a prompt that are held while it is read; of a longer one, those with the lowest scores are
    evicted on the way."""
    prefill_chunk: Tokens = 512
    """Prompt tokens read in one step."""
