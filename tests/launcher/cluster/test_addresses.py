import pytest

from launcher.cluster.addresses import node_address
from launcher.config.slurm import SlurmConfig

PRESENT = {"lo": "127.0.0.1", "eth0": "10.0.0.7", "ib0": "10.1.0.7"}


def test_the_address_of_the_nodes_name_is_used() -> None:
    assert node_address("n7", SlurmConfig(), present=PRESENT, resolved="10.1.0.7") == ("10.1.0.7", "ib0")


def test_a_named_interface_comes_before_the_name_and_an_address_before_both() -> None:
    slurm = SlurmConfig(interface="eth0")
    assert node_address("n7", slurm, present=PRESENT, resolved="10.1.0.7") == ("10.0.0.7", "eth0")
    slurm = SlurmConfig(interface="eth0", addresses={"n7": "10.1.0.7"})
    assert node_address("n7", slurm, present=PRESENT, resolved="") == ("10.1.0.7", "ib0")
    assert node_address("n8", slurm, present=PRESENT, resolved="") == ("10.0.0.7", "eth0")


def test_a_name_that_leads_to_the_loopback_gives_way_to_the_only_other_address() -> None:
    one = {"lo": "127.0.0.1", "eth0": "10.0.0.7"}
    assert node_address("n7", SlurmConfig(), present=one, resolved="127.0.1.1") == ("10.0.0.7", "eth0")
    with pytest.raises(ValueError, match=r"n7: its name leads to 127.0.1.1.*set `cluster.slurm.interface`"):
        node_address("n7", SlurmConfig(), present=PRESENT, resolved="127.0.1.1")


def test_an_interface_or_address_that_is_not_there_is_refused_with_what_is() -> None:
    with pytest.raises(ValueError, match=r"`cluster.slurm.interface` = ib9 is not on n7; it has: eth0 10.0.0.7, ib0"):
        node_address("n7", SlurmConfig(interface="ib9"), present=PRESENT, resolved="")
    with pytest.raises(ValueError, match=r"`cluster.slurm.addresses.n7` = 10.9.0.1 is not on that node"):
        node_address("n7", SlurmConfig(addresses={"n7": "10.9.0.1"}), present=PRESENT, resolved="")
