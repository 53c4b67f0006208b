import socket
from types import SimpleNamespace

import psutil
import pytest

from launcher.cluster.addresses import interfaces, node_address
from launcher.config.slurm import SlurmConfig

PRESENT = {"lo": ("127.0.0.1",), "eth0": ("10.0.0.7",), "ib0": ("10.1.0.7",)}
BOND = {"lo": ("127.0.0.1", "10.255.0.7"), "bond0": ("192.168.5.7", "10.0.0.7")}


def test_the_address_of_the_nodes_name_is_used() -> None:
    assert node_address("n7", SlurmConfig(), present=PRESENT, resolved="10.1.0.7") == ("10.1.0.7", "ib0")


def test_a_named_interface_comes_before_the_name_and_an_address_before_both() -> None:
    slurm = SlurmConfig(interface="eth0")
    assert node_address("n7", slurm, present=PRESENT, resolved="10.1.0.7") == ("10.0.0.7", "eth0")
    slurm = SlurmConfig(interface="eth0", addresses={"n7": "10.1.0.7"})
    assert node_address("n7", slurm, present=PRESENT, resolved="") == ("10.1.0.7", "ib0")
    assert node_address("n8", slurm, present=PRESENT, resolved="") == ("10.0.0.7", "eth0")


def test_a_name_that_leads_to_the_loopback_gives_way_to_the_only_other_address() -> None:
    one = {"lo": ("127.0.0.1",), "eth0": ("10.0.0.7",)}
    assert node_address("n7", SlurmConfig(), present=one, resolved="127.0.1.1") == ("10.0.0.7", "eth0")
    with pytest.raises(ValueError, match=r"n7: its name leads to 127.0.1.1.*set `cluster.slurm.interface`"):
        node_address("n7", SlurmConfig(), present=PRESENT, resolved="127.0.1.1")


def test_every_address_of_an_interface_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = {
        name: [SimpleNamespace(family=socket.AF_INET6, address="fe80::1")]
        + [SimpleNamespace(family=socket.AF_INET, address=address) for address in found]
        for name, found in BOND.items()
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: listed | {"ib0": listed["lo"][:1]})
    assert interfaces() == BOND


def test_a_second_address_of_an_interface_is_used_where_the_nodes_name_or_the_user_says_so() -> None:
    assert node_address("n7", SlurmConfig(), present=BOND, resolved="10.0.0.7") == ("10.0.0.7", "bond0")
    slurm = SlurmConfig(addresses={"n7": "10.0.0.7"})
    assert node_address("n7", slurm, present=BOND, resolved="192.168.5.7") == ("10.0.0.7", "bond0")
    with pytest.raises(ValueError, match=r"it has: bond0 192\.168\.5\.7, bond0 10\.0\.0\.7, lo 127\.0\.0\.1, lo 10"):
        node_address("n7", SlurmConfig(addresses={"n7": "10.9.0.1"}), present=BOND, resolved="")


def test_a_named_interface_has_the_address_of_the_nodes_name_or_else_its_first() -> None:
    slurm = SlurmConfig(interface="bond0")
    assert node_address("n7", slurm, present=BOND, resolved="10.0.0.7") == ("10.0.0.7", "bond0")
    assert node_address("n7", slurm, present=BOND, resolved="10.9.0.1") == ("192.168.5.7", "bond0")


def test_a_name_that_leads_elsewhere_gives_way_to_the_first_address_of_the_only_other_interface() -> None:
    for elsewhere in ("127.0.1.1", "10.255.0.7"):  # the second one is of the loopback interface
        assert node_address("n7", SlurmConfig(), present=BOND, resolved=elsewhere) == ("192.168.5.7", "bond0")


def test_an_interface_or_address_that_is_not_there_is_refused_with_what_is() -> None:
    with pytest.raises(ValueError, match=r"`cluster.slurm.interface` = ib9 is not on n7; it has: eth0 10.0.0.7, ib0"):
        node_address("n7", SlurmConfig(interface="ib9"), present=PRESENT, resolved="")
    with pytest.raises(ValueError, match=r"`cluster.slurm.addresses.n7` = 10.9.0.1 is not on that node"):
        node_address("n7", SlurmConfig(addresses={"n7": "10.9.0.1"}), present=PRESENT, resolved="")
