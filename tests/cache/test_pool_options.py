"""Pools as users configure them: their labels, and what is refused."""

import pytest

from cache.policy import PolicyName
from cache.policy_options import PolicyOptions
from cache.pool_options import KVCacheDtype, PoolOptions, check_names


def test_a_pool_without_a_name_is_called_by_its_policy() -> None:
    full = PolicyOptions(PolicyName.FULL)
    assert [PoolOptions().label, PoolOptions(1, full).label] == ["snapstream", "full"]
    assert PoolOptions(1, full, "exact").label == "exact"


def test_labels_must_differ() -> None:
    check_names((PoolOptions(), PoolOptions(name="other")))
    with pytest.raises(ValueError, match="2 pools have the name snapstream"):
        check_names((PoolOptions(), PoolOptions(name="snapstream")))
    with pytest.raises(ValueError, match="at least one pool is needed"):
        check_names(())


@pytest.mark.parametrize("name", ["a b", "x" * 65, "é"])
def test_invalid_names_are_refused(name: str) -> None:
    PoolOptions(name="x" * 64)
    with pytest.raises(ValueError, match="name must be up to 64 letters"):
        PoolOptions(name=name)


def test_a_pool_may_have_no_slots() -> None:
    PoolOptions(0)
    with pytest.raises(ValueError, match="num_slots must be at least 0, got -1"):
        PoolOptions(-1)


@pytest.mark.parametrize("kind", [KVCacheDtype.INT8, KVCacheDtype.FP8])
def test_sparse_pools_have_a_type_of_their_own(kind: KVCacheDtype) -> None:
    with pytest.raises(ValueError, match=f"kv_cache_dtype must be auto for policy sparse, got {kind}"):
        PoolOptions(1, PolicyOptions(PolicyName.SPARSE), kv_cache_dtype=kind)
