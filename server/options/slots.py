"""The options about slots: of the only pool, or, written behind `--pool`, of each of several."""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

from backends.torch_backend.config import DEFAULT_MAX_MODEL_LEN
from cache.policy import PolicyName
from cache.policy_options import DEFAULT_SCORERS, LayerBudgets, PolicyOptions
from cache.pool_options import PoolOptions, check_names
from cache.scorer import HeadReduction, Pooling, QueryReduction, SoftmaxDomain, WindowScorer
from server.options.option import Option, OptionError, OptionGroup, choices, integer, one_of, switch
from server.options.pools import read_pool


def _scorer_option(name: str, parse: Callable[[str], Any], text: str, metavar: str) -> Option:
    """Return an option whose default is that of the policy's scorer."""
    own, other = (
        getattr(DEFAULT_SCORERS[policy], name.replace("-", "_"))
        for policy in (PolicyName.SNAPSTREAM, PolicyName.SNAPKV)
    )
    return Option(
        name, parse, None, text, metavar, str(own) if own == other else f"{own}; {other} for policy snapkv"
    )


ONE_POOL = OptionGroup(
    "Slots",
    (
        Option("num-slots", integer(1), 8, "Slots: sequences that are generated at once.", "N"),
        Option(
            "policy",
            one_of(PolicyName),
            PolicyName.SNAPSTREAM,
            "What a slot holds of its sequence.",
            choices(PolicyName),
        ),
        Option(
            "slot-capacity",
            integer(1),
            None,
            "Entries of a slot.",
            "N",
            "2048, or the sum of the sizes given; with policy full the longest sequence",
        ),
        Option("num-sink", integer(0), None, "Entries for a sequence's first tokens.", "N", "4"),
        Option("num-recent", integer(1), None, "Entries for its newest tokens.", "N", "half of the rest"),
        Option(
            "num-kept", integer(0), None, "Entries for the prompt's best tokens.", "N", "half of the rest"
        ),
        _scorer_option(
            "observation-window",
            integer(1),
            "Tokens at a prompt's end whose attention scores the others.",
            "TOKENS",
        ),
        _scorer_option(
            "observation-half-life",
            integer(0),
            "Distance from the prompt's end at which such a token's vote counts half; 0: all count alike.",
            "TOKENS",
        ),
        _scorer_option(
            "softmax-domain",
            one_of(SoftmaxDomain),
            "Keys over which the scoring attention is normalised.",
            choices(SoftmaxDomain),
        ),
        _scorer_option(
            "query-reduction",
            one_of(QueryReduction),
            "How the observing tokens agree on scores.",
            choices(QueryReduction),
        ),
        _scorer_option("pooling", one_of(Pooling), "How neighbouring scores are smoothed.", choices(Pooling)),
        _scorer_option("pooling-size", integer(1), "Tokens over which they are smoothed; odd.", "TOKENS"),
        _scorer_option(
            "pooling-shift",
            integer(0),
            "Tokens by which the smoothing is shifted, so that what follows a high score is kept.",
            "TOKENS",
        ),
        _scorer_option(
            "pooling-half-life",
            integer(0),
            "Tokens of distance at which a score counts half in its neighbours'; 0: all alike.",
            "TOKENS",
        ),
        _scorer_option(
            "head-reduction",
            one_of(HeadReduction),
            "How the query heads of a KV head agree on scores.",
            choices(HeadReduction),
        ),
        _scorer_option(
            "selection-chunk", integer(1), "Neighbouring tokens that are kept or dropped together.", "TOKENS"
        ),
        Option("lend-kept", switch, False, "Let unused kept entries lengthen the ring.", ""),
        Option(
            "lend-ring",
            switch,
            None,
            "Let three quarters of the ring hold more of a long prompt's best tokens instead of its newest, until the answer comes.",
            "",
            "yes; no for other policies than snapstream",
        ),
        Option(
            "layer-budgets",
            one_of(LayerBudgets),
            None,
            "How the layers share all kept entries: alike, or by how much each looks things up.",
            choices(LayerBudgets),
            "measured; equal for other policies than snapstream",
        ),
        Option(
            "share-votes",
            switch,
            None,
            "Let the layers behind the one that looks up most choose by what it looks for too.",
            "",
            "yes where layer-budgets is measured",
        ),
    ),
)


def pools_of(values: Mapping[str, Any]) -> tuple[PoolOptions, ...]:
    """Return the pools that these options describe. Raises OptionError, or ValueError that names a field and its limit."""
    max_model_len = values["max_model_len"] or DEFAULT_MAX_MODEL_LEN
    if not values["pool"]:
        return (_pool("", values, max_model_len),)
    for option in ONE_POOL.options:
        if values[option.key] != option.default:
            raise OptionError(
                f"{option.flag} describes the slots where there is one pool; with --pool, it is one of the pool's keys"
            )
    pools = []
    for written in values["pool"]:
        name, own = read_pool(written, ONE_POOL.options)
        try:
            pools.append(_pool(name, own, max_model_len))
        except ValueError as error:
            raise OptionError(f"--pool {written}: {error}") from error
    try:
        check_names(tuple(pools))
    except ValueError as error:
        raise OptionError(f"--pool: {error}; choose others by the key name") from error
    return tuple(pools)


def _pool(name: str, values: Mapping[str, Any], max_model_len: int) -> PoolOptions:
    """Return a pool of these options. Raises ValueError for what cannot be, whatever the model."""
    policy_fields = (
        "slot_capacity",
        "num_sink",
        "num_recent",
        "num_kept",
        "lend_kept",
        "lend_ring",
        "layer_budgets",
        "share_votes",
    )
    scorer = DEFAULT_SCORERS.get(values["policy"])
    if scorer is not None:
        given = {field.name: values[field.name] for field in fields(WindowScorer)}
        scorer = replace(scorer, **{field: value for field, value in given.items() if value is not None})
    policy = PolicyOptions(
        name=values["policy"], scorer=scorer, **{field: values[field] for field in policy_fields}
    )
    policy.resolve(max_model_len)
    return PoolOptions(values["num_slots"], policy, name)
