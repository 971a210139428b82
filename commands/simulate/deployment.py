"""The deployments and cache policies that the options select."""

from collections.abc import Iterable
from dataclasses import replace

from backends.sn40l.backend import default_deployment, simulated_store
from backends.sn40l.description.hardware import Machine, load_machine
from backends.sn40l.description.model_config import Model, load_model
from backends.sn40l.step.deployment import Deployment, Execution
from backends.sn40l.step.speculation import Speculation
from backends.timed import SimulatedStore
from cache.policy import CachePolicy, PolicyName
from cache.policy_options import PolicyOptions
from cache.pool_options import KVCacheDtype
from commands.simulate.arrivals import HASH_TOKENS, Arrival
from commands.simulate.candidate import Candidate
from commands.simulate.drafting import Drafting
from commands.simulate.load import Load
from commands.simulate.options import MachineOptions, ServingOptions, WeightDtype
from commands.simulate.switching import Switching
from server.options.command_line import OptionError


def deployment_of(
    options: MachineOptions, num_sockets: int | None = None, *, loops: bool = True
) -> Deployment:
    """Return the deployment on `num_sockets` sockets (None: all). Raises `OptionError` for too many."""
    max_sockets = load_machine(options.machine).max_sockets
    if num_sockets is not None and num_sockets > max_sockets:
        raise OptionError(
            f"--sockets must be from 1 to {max_sockets}, the number of --machine {options.machine}, "
            f"got {num_sockets}"
        )
    deployment = default_deployment(
        options.model, options.machine, num_sockets or max_sockets, loops=loops, uses_ddr=options.uses_ddr
    )
    model = _stored(options, deployment.model)
    return replace(deployment, model=model, slots_in_ddr=options.slots_in_ddr, num_nodes=options.nodes)


_LINEAR_BYTES = {WeightDtype.AUTO: None, WeightDtype.BFLOAT16: 2.0, WeightDtype.INT8: 1.0}
_SCALED = 1.04  # a byte and the server's scales
_CACHE_BYTES = {KVCacheDtype.AUTO: None, KVCacheDtype.INT8: _SCALED, KVCacheDtype.FP8: _SCALED}


def _stored(options: MachineOptions, model: Model) -> Model:
    """Return the model in the types of the options."""
    linear, cache = _LINEAR_BYTES[options.weight_dtype], _CACHE_BYTES[options.kv_cache_dtype]
    return model.stored_in(linear=linear, cache=cache)


def serving_deployment(options: ServingOptions, num_sockets: int | None) -> Deployment:
    """Return the deployment of `plan` and `replay`, with the weights of drafts beside the model's."""
    deployment = deployment_of(options, num_sockets)
    if options.execution is not None:
        deployment = replace(deployment, execution=options.execution)
    drafts = {options.speculative_prefill_model, options.draft_model}
    return replace(deployment, beside=tuple(load_model(draft) for draft in sorted(filter(None, drafts))))


def drafting_of(options: ServingOptions, deployment: Deployment) -> Drafting | None:
    """Return what shortens long prompts on this deployment."""
    if options.speculative_prefill_model is None:
        return None
    draft = load_model(options.speculative_prefill_model)
    return Drafting(
        replace(deployment, model=draft, beside=()),
        options.speculative_prefill_threshold,
        options.speculative_prefill_keep,
    )


def speculation_of(options: ServingOptions) -> Speculation | None:
    """Return the speculative decoding.

    Raises `OptionError` for a draft without an acceptance, or the reverse.
    """
    if (options.draft_model is None) != (options.acceptance is None):
        raise OptionError("--draft-model and --acceptance need each other: no acceptance is published")
    if options.draft_model is None or options.acceptance is None:
        return None
    return Speculation(load_model(options.draft_model), options.num_drafts, options.acceptance)


def switching_of(options: ServingOptions, deployment: Deployment) -> Switching | None:
    """Return the models that take turns. Raises `OptionError` for what only one model can have."""
    if not options.other_models:
        return None
    for name in ("speculative_prefill_model", "draft_model", "prefix_cache_bytes"):
        if getattr(options, name) is not None:
            raise OptionError(f"--{name.replace('_', '-')} is of one model, and --other-models has more")
    others = (replace(deployment, model=_stored(options, load_model(name))) for name in options.other_models)
    return Switching((deployment, *others), options.longest_turn, options.seed)


def candidate_of(
    options: ServingOptions, deployment: Deployment, policy: CachePolicy, load: Load, num_slots: int = 1
) -> Candidate:
    """Return this deployment with drafts, stored prompts and other models as the options say.

    Raises `OptionError` for speculative decoding with a store, which is not served.
    """
    if policy.store is not None and options.draft_model is not None:
        raise OptionError(f"--draft-model needs another policy than {policy.name}, which verifies no drafts")
    switching = switching_of(options, deployment)
    return Candidate(
        deployment,
        policy,
        num_slots,
        is_paged=options.paged,
        max_inter_token_latency=options.max_inter_token_latency,
        prefill_chunk=options.prefill_chunk,
        store=None if switching else prompt_store(options, deployment, load.arrivals),
        drafting=drafting_of(options, deployment),
        speculation=speculation_of(options),
        switching=switching,
    )


def policy_of(options: MachineOptions, name: PolicyName, slot_capacity: int) -> PolicyOptions:
    """Return a policy with slots of `slot_capacity` entries. `full` and `sparse` hold every token instead.

    Raises `OptionError` for `sparse` with slots in 8 bits, which the server refuses too.
    """
    if name is PolicyName.SPARSE and options.kv_cache_dtype is not KVCacheDtype.AUTO:
        raise OptionError(f"--kv-cache-dtype must be auto for policy {name}, got {options.kv_cache_dtype}")
    holds_all = name in (PolicyName.FULL, PolicyName.SPARSE)
    return PolicyOptions(name, slot_capacity=None if holds_all else slot_capacity)


def prompt_store(
    options: ServingOptions, deployment: Deployment, arrivals: Iterable[Arrival]
) -> SimulatedStore | None:
    """Return where the blocks of prompts are stored; None if the arrivals do not say what prompts share.

    Raises `OptionError` for a size without such arrivals.
    """
    num_bytes = options.prefix_cache_bytes
    if not any(arrival.hash_ids for arrival in arrivals):
        if num_bytes is not None:
            raise OptionError("--prefix-cache-bytes needs a --trace with hash_ids")
        return None
    return simulated_store(deployment, num_bytes, HASH_TOKENS)


def default_executions(machine: Machine) -> tuple[Execution, ...]:
    """Return the executions that a sweep compares: those without spilling that the machine supports."""
    return (Execution.FUSED, Execution.LOOPED) if machine.loops_layers else (Execution.FUSED,)
