"""Machine files: complete, sourced, and within their own ranges."""

from dataclasses import replace
from pathlib import Path

import pytest

from backends.sn40l.description.hardware import (
    MachineFileError,
    load_machine,
    load_machine_file,
    machine_names,
)

FOLDER = Path("backends/sn40l/description/data/machines")


@pytest.mark.parametrize("name", machine_names())
def test_every_number_has_a_source_and_is_in_its_range(name: str) -> None:
    for key, quantity in load_machine_file(name).quantities.items():
        assert len(quantity.source) > 10, key
        marked = quantity.source.startswith(("assumption", "fitted"))
        assert marked is not quantity.is_published, (
            f"{key}: what is not published needs a range, and what is published has none"
        )
        if quantity.low is not None and quantity.high is not None:
            assert quantity.low <= quantity.value <= quantity.high, key


def test_published_sums_of_a_node() -> None:
    """As Hot Chips 2024 gives them for 16 sockets."""
    socket = load_machine("sn40l")
    assert 16 * socket.hbm_bandwidth == pytest.approx(25.6e12)
    assert 16 * socket.hbm_capacity == pytest.approx(1.024e12)
    assert 16 * socket.matrix_rate == pytest.approx(10.208e15)
    assert 16 * socket.ddr_capacity == pytest.approx(24e12)
    assert socket.sram_capacity == pytest.approx(520 * 2**20)


def test_a_custom_machine_is_a_file(tmp_path: Path) -> None:
    text = (FOLDER / "sn40l.toml").read_text().replace("value = 1.6e12", "value = 3.2e12")
    (tmp_path / "faster.toml").write_text(text)
    assert load_machine(str(tmp_path / "faster.toml")).hbm_bandwidth == 3.2e12


def test_a_machine_that_is_its_own_base_is_refused(tmp_path: Path) -> None:
    one, other = tmp_path / "one.toml", tmp_path / "other.toml"
    one.write_text(f'base = "{other}"\n')
    other.write_text(f'base = "{one}"\n')
    with pytest.raises(MachineFileError, match="its base must not be itself"):
        load_machine_file(str(one))


def test_a_machine_with_a_base_has_only_what_differs(tmp_path: Path) -> None:
    text = 'base = "h100"\n[hbm_bandwidth]\nvalue = 9e12\nsource = "a machine of tomorrow"\n'
    (tmp_path / "next.toml").write_text(text)
    made = load_machine(str(tmp_path / "next.toml"))
    assert made == replace(load_machine("h100"), hbm_bandwidth=9e12)


def test_incomplete_machines_are_refused(tmp_path: Path) -> None:
    (tmp_path / "half.toml").write_text(
        'title = "half"\n[launch]\nvalue = 1\nsource = "nowhere in particular"\n[wings]\nvalue '
        '= 2\nsource = "x"\n'
    )
    with pytest.raises(MachineFileError, match=r"missing \[.*'hbm_bandwidth'.*unknown \['wings'\]"):
        load_machine(str(tmp_path / "half.toml"))
    with pytest.raises(MachineFileError, match="no machine 'tpu'"):
        load_machine("tpu")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("value = 1.6e12", "value = 0", "hbm_bandwidth must be a number above 0, got 0"),
        ("value = 1.6e12", "value = -1.0", "hbm_bandwidth must be a number above 0, got -1.0"),
        ("value = 1.6e12", 'value = "fast"', "hbm_bandwidth needs a value and a source"),
        ("value = 1.6e12", "wert = 1.6e12", "hbm_bandwidth needs a value and a source"),
    ],
)
def test_numbers_that_are_no_machines_are_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    (tmp_path / "odd.toml").write_text((FOLDER / "sn40l.toml").read_text().replace(old, new))
    with pytest.raises(MachineFileError, match=message):
        load_machine(str(tmp_path / "odd.toml"))
