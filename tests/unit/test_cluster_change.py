"""What may change while a cluster serves, and in which order."""

import shutil
from pathlib import Path

import pytest

from cluster.config import Config, changed
from cluster.control.change import (
    check_change,
    check_role,
    check_scale,
    in_order,
    is_last_of_its_model,
    to_scale,
)
from cluster.control.replicas import Replica, State
from cluster.resolve import with_devices
from tests.support.prompts import TINY
from worker.api import Member, Role
from worker.errors import UserError


def replica(name: str, digest: str = "") -> Replica:
    role: Role = "prefill" if name.startswith("prefill") else "decode"
    made = Replica(name, role, State.READY)
    made.member = Member(name, role, "1", "tcp://x", digest=digest)
    return made


def test_settings_of_workers_may_change_and_the_rest_stays() -> None:
    sets = ["decode.engine.max_num_reqs=7", "spec.drafter=ngram", "lease.final_resend_s=3"]
    after = changed(Config(), sets)
    check_change(Config(), after)
    assert (after.decode.engine.max_num_reqs, after.spec.drafter) == (7, "ngram")
    assert after.prefill == Config().prefill
    assert changed(after, []) == after


@pytest.mark.parametrize(
    "leaf",
    ["cluster.port=1", "decode.replicas=3", "decode.tp=2", "router.max_inflight=9",
     "transport.name=shm", "decode.engine.device=cpu", "model.served_name=other"],
)  # fmt: skip
def test_what_decides_on_places_or_routers_is_refused_by_name(leaf: str) -> None:
    with pytest.raises(UserError, match=leaf.partition("=")[0]):
        check_change(Config(), changed(Config(), [leaf]))


def test_other_weights_may_come_but_no_other_tokenizer(tmp_path: Path) -> None:
    copy = shutil.copytree(TINY, tmp_path / "other")
    after = changed(Config(), [f"model.path={copy}"])
    check_change(Config(), after)
    with (copy / "tokenizer.json").open("a") as file:
        file.write(" ")
    with pytest.raises(UserError, match=r"tokenizer\.json is another one"):
        check_change(Config(), after)
    shutil.copy(TINY / "tokenizer.json", copy)
    (copy / "additional_chat_templates").mkdir()
    (copy / "additional_chat_templates" / "tool_use.jinja").write_text("hi")
    with pytest.raises(UserError, match=r"tool_use\.jinja is another one"):
        check_change(Config(), after)


def test_decode_workers_of_the_old_model_find_a_prefill_worker_of_it_to_the_last() -> None:
    names = ["decode-0", "decode-1", "prefill-0", "prefill-1"]
    order = in_order(list(map(replica, names)))
    assert order == ["prefill-0", "decode-0", "decode-1", "prefill-1"]
    assert in_order([replica("decode-0"), replica("prefill-0")]) == ["decode-0", "prefill-0"]


def test_who_alone_has_a_model_is_known() -> None:
    new, old, other = replica("decode-0", "b"), replica("decode-1", "a"), replica("decode-2", "a")
    prefill = replica("prefill-0", "a")
    assert is_last_of_its_model(new, [new, old, other, prefill])
    assert not is_last_of_its_model(old, [new, old, other, prefill])
    other.renewing = True
    assert is_last_of_its_model(old, [new, old, other, prefill])
    assert not is_last_of_its_model(prefill, [new, old, other, prefill])


def test_a_worker_turns_unless_its_role_or_its_place_forbids_it() -> None:
    config = with_devices(Config(), has_gpus=False)
    one, other, prefill = map(replica, ("decode-0", "decode-1", "prefill-0"))
    everybody = [one, other, prefill]
    check_role(config, one, "prefill", everybody)
    for turned, role, why in (
        (prefill, "decode", "prefill-0 is the last prefill worker"),
        (one, "decode", "decode-0 has the role decode"),
    ):
        with pytest.raises(UserError, match=why):
            check_role(config, turned, role, everybody)
    other.renewing = True
    with pytest.raises(UserError, match="the last decode worker"):
        check_role(config, one, "prefill", everybody)
    other.renewing = False
    for leaf, why in (("prefill.tp=2", "prefill.tp is 2"), ("prefill.num_cpus=2", "resources")):
        with pytest.raises(UserError, match=why):
            check_role(changed(config, [leaf]), one, "prefill", everybody)


def test_names_come_with_the_lowest_free_numbers_and_those_that_are_not_ready_go_first() -> None:
    names = [f"decode-{i}" for i in (0, 2, 10)]
    replicas = [replica(name) for name in (*names, "prefill-0")]
    for wanted, come, go in (
        ({"decode": 6}, ["decode-1", "decode-3", "decode-4"], []),
        ({"decode": 3, "prefill": 2}, ["prefill-1"], []),
        ({"decode": 1, "prefill": 0}, [], ["decode-2", "decode-10", "prefill-0"]),
        ({"decode": 0}, [], names),
        ({"router": 1}, ["router-0"], []),
    ):
        further, leaving = to_scale(wanted, replicas)
        assert ([record.name for record in further], leaving) == (come, go)
    replicas[0].state = State.LOST
    assert to_scale({"decode": 2}, replicas) == ([], ["decode-0"])
    replicas[0].leaving = True
    assert to_scale({"decode": 2}, replicas) == ([], [])
    (record,), _ = to_scale({"decode": 3}, replicas)
    assert record.name == "decode-1", "the name that leaves is not free yet"


def test_a_turned_worker_counts_for_the_role_that_it_has() -> None:
    turned = replica("decode-1")
    turned.role = "prefill"
    (record,), leaving = to_scale({"decode": 2}, [replica("decode-0"), turned])
    assert (record.name, record.role, leaving) == ("decode-2", "decode", [])


def test_more_routers_come_only_where_their_port_is_shared() -> None:
    one, two = (with_devices(changed(Config(), [f"routers.replicas={n}"]), has_gpus=False)
                for n in (1, 2))  # fmt: skip
    check_scale(two, {"router": 5})
    check_scale(one, {"router": 1, "decode": 9})
    with pytest.raises(UserError, match="serve --router N"):
        check_scale(one, {"router": 2})
