"""A silo's own copy of the run's state: computed, asked for, compared, and never taken over unseen."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from tests.rounds.test_run_state import WEIGHTS, job, made_total

from tightframe.errors import RunError
from tightframe.files import append_durably
from tightframe.phases import ServerState
from tightframe.rounds.notes import RESUMED, VERIFIED, note_verified
from tightframe.rounds.run_state import start_state, state_bytes, state_sha256
from tightframe.rounds.setup import JobSetup
from tightframe.rounds.silo import followed_state
from tightframe.rounds.silo.followed_state import FollowedState, next_state
from tightframe.rounds.silo.own_state import NeedsStateError
from tightframe.rounds.state_files import FOLLOWED, PRETRAINED
from tightframe.securesum.messages import SumId, Total

WIDTHS = {"widths": [8, 8]}


class Run:
    """A run's states and totals, and requests that rest on them."""

    def __init__(self, setup: JobSetup) -> None:
        self.setup = setup
        self.states = [start_state(setup, None)[0]]
        self.totals: list[Total] = []
        for number, exchange in enumerate(setup.plan):
            self.totals.append(made_total(setup, exchange, self.states[-1], number))
            self.states.append(next_state(setup, self.states[-1], self.totals[-1], WEIGHTS))

    def request(self, step: int, **values: Any) -> tuple[dict[str, Any], Total | None]:
        before = "" if step == 0 else state_sha256(self.states[step - 1])
        message = {"state": state_sha256(self.states[step]), "before": before}
        return message | values, None if step == 0 else self.totals[step - 1]

    def sent(self, step: int) -> dict[str, Any]:
        return {"state_bytes": state_bytes(self.states[step])}


@pytest.fixture(scope="module")
def run() -> Run:
    return Run(job(summation="secure"))


def silo(folder: Path, run: Run, name: str = "a") -> FollowedState:
    """A silo; ``a`` is in every total, and another one in none."""
    return FollowedState(folder, run.setup, name, logging.getLogger("test"))


def gave(folder: Path, run: Run, step: int) -> None:
    """The silo gave its shares of the sum that rests on a state."""
    note_verified(folder, bytes.fromhex(state_sha256(run.states[step])), sum_of(run, step))


def sum_of(run: Run, step: int) -> SumId:
    """The sum that rests on a state; after the last one a seal."""
    return run.totals[step].sum_id if step < len(run.totals) else SumId(9, "seal-0")


def same(one: ServerState, other: ServerState) -> bool:
    return state_bytes(one) == state_bytes(other)


def test_a_silo_computes_each_state_in_one_process_or_in_many(tmp_path: Path, run: Run) -> None:
    lasting = silo(tmp_path / "one", run)
    for step in range(len(run.states)):
        for followed, folder in (
            (lasting, tmp_path / "one"),
            (silo(tmp_path / "many", run), tmp_path / "many"),
        ):
            message, total = run.request(step)
            state, follows = followed.advance(message, total, WEIGHTS)
            assert follows and same(state, run.states[step])
            gave(folder, run, step)
    assert (tmp_path / "one" / FOLLOWED).stat().st_mode & 0o777 == 0o600


def test_a_silo_vouches_for_no_state_behind_an_unverified_total(tmp_path: Path, run: Run) -> None:
    """Whatever the server leaves out or brings again: no second total rests on an unverified one."""
    followed = silo(tmp_path, run)
    assert followed.advance(*run.request(0), WEIGHTS)[1]  # the start rests on no total
    gave(tmp_path, run, 0)
    message, total = run.request(1)
    assert total is not None
    for _ in range(2):  # asked again, because the exchange failed
        assert followed.advance(message, total, WEIGHTS)[1]
    other = replace(total, survivors=("a", "b"))
    for one in (followed, silo(tmp_path, run)):  # the same state, but not what it rests on
        assert not one.advance(message, None, WEIGHTS)[1]
        with pytest.raises(NeedsStateError):
            one.advance(message, other, WEIGHTS)
    with pytest.raises(RunError, match="it missed nothing"):
        followed.advance(message | run.sent(1), other, WEIGHTS)
    state, follows = followed.advance(*run.request(2), WEIGHTS)
    assert same(state, run.states[2]) and not follows
    gave(tmp_path, run, 2)
    assert followed.advance(run.request(2)[0], None, WEIGHTS)[1]  # verified: as in the next epoch
    assert followed.advance(*run.request(3), WEIGHTS)[1]


def test_one_state_is_not_summed_twice(tmp_path: Path, run: Run) -> None:
    """The state before a total that is told is refused, or, by a silo that is not in it, not vouched for."""
    followed = silo(tmp_path, run)
    followed.advance(*run.request(0), WEIGHTS)
    _, total = run.request(1)
    again = {"state": state_sha256(run.states[0]), **run.sent(0)}
    with pytest.raises(RunError, match="TF-518"):
        followed.advance(again | {"before": state_sha256(run.states[0])}, total, WEIGHTS)
    with pytest.raises(RunError, match="it missed nothing"):
        followed.advance(again | {"before": "0" * 64}, total, WEIGHTS)
    late = silo(tmp_path / "late", run, "late")
    assert not late.advance(again | {"before": "0" * 64}, total, WEIGHTS)[1]


def test_a_silo_trains_on_one_state_that_it_cannot_check_behind_a_total(tmp_path: Path, run: Run) -> None:
    """How long it trains may tell of a record: many states would be as many questions."""
    late = silo(tmp_path, run, "late")
    message, total = run.request(2)
    for _ in range(2):
        assert not late.advance(message | run.sent(2), total, WEIGHTS)[1]
    crafted = run.states[2].evolve(model={name: value + 1 for name, value in run.states[2].model.items()})
    sent = {"state": state_sha256(crafted), "state_bytes": state_bytes(crafted)}
    for one in (late, silo(tmp_path, run, "late")):
        with pytest.raises(RunError, match="before, but got another"):
            one.advance(message | sent, total, WEIGHTS)
    twice = next_state(run.setup, run.states[2], total, WEIGHTS)
    more = {"state": state_sha256(twice), "before": message["state"]}
    with pytest.raises(NeedsStateError):  # what it has includes that total already
        late.advance(message | more, total, WEIGHTS)


@pytest.mark.parametrize("before", ["", "0" * 64, "the state itself"])
def test_nor_is_one_that_was_verified(tmp_path: Path, run: Run, before: str) -> None:
    """A silo that gave its shares for a state does not vouch for it behind a total, nor when asked twice."""
    followed = silo(tmp_path, run)
    followed.advance(*run.request(0), WEIGHTS)
    gave(tmp_path, run, 0)
    _, total = run.request(1)
    own = state_sha256(run.states[0])
    again = {"state": own, "before": own if before == "the state itself" else before, **run.sent(0)}
    for _ in range(2):
        try:
            assert not followed.advance(again, total, WEIGHTS)[1]
        except RunError as error:
            assert error.code == "TF-518"


def test_a_silo_does_not_vouch_for_what_follows_from_a_sum_that_it_was_not_in(
    tmp_path: Path, run: Run
) -> None:
    """Nobody has told it which state the terms of that sum rest on: the total could be another state's."""
    followed = silo(tmp_path, run)
    followed.advance(*run.request(0), WEIGHTS)
    gave(tmp_path, run, 0)
    later = run.totals[1]
    state = next_state(run.setup, run.states[0], later, WEIGHTS)  # without the first total
    message = {"state": state_sha256(state), "before": state_sha256(run.states[0])}
    found, follows = followed.advance(message, later, WEIGHTS)
    assert same(found, state) and not follows
    assert not followed.advance(message, later, WEIGHTS)[1]


def test_rounding_does_not_add_up(tmp_path: Path, run: Run) -> None:
    """A server that asks again and again moves the start no further than two machines can differ."""
    followed = silo(tmp_path, run)
    state = run.states[0]
    for step in range(3):
        state = state.evolve(model={name: value * (1 + 6e-5) for name, value in state.model.items()})
        message, total = run.request(0, state=state_sha256(state), state_bytes=state_bytes(state))
        if step == 0:
            assert followed.advance(message, total, WEIGHTS)[1]
            continue
        with pytest.raises(RunError, match="TF-518"):
            followed.advance(message, total, WEIGHTS)


@pytest.mark.parametrize("crafted", [True, False])
def test_who_missed_an_exchange_before_an_epoch_comes_back_behind_its_first_total(
    tmp_path: Path, run: Run, crafted: bool
) -> None:
    """The first exchange of an epoch tells no total: there is nothing to check a state by."""
    followed = silo(tmp_path, run, "late")
    for step in (0, 1):
        followed.advance(*run.request(step), WEIGHTS)
        gave(tmp_path, run, step)
    message, _ = run.request(2)
    with pytest.raises(NeedsStateError):
        followed.advance(message, None, WEIGHTS)
    shift = float(crafted)
    state = run.states[2].evolve(model={name: value + shift for name, value in run.states[2].model.items()})
    sent = {"state": state_sha256(state), "state_bytes": state_bytes(state)}
    for _ in range(2):
        with pytest.raises(RunError, match=r"^TF-519: .*takes part again"):
            followed.advance(message | sent, None, WEIGHTS)
    message, total = run.request(3)
    state, follows = followed.advance(message | run.sent(3), total, WEIGHTS)
    assert same(state, run.states[3]) and not follows


def test_who_is_past_the_start_does_not_go_back_to_one_of_the_servers(tmp_path: Path, run: Run) -> None:
    followed = silo(tmp_path, run)
    for step in (0, 1):
        followed.advance(*run.request(step), WEIGHTS)
        gave(tmp_path, run, step)
    rounded = run.states[0].evolve(
        model={name: value * (1 + 1e-6) for name, value in run.states[0].model.items()}
    )
    message = {"state": state_sha256(rounded), "before": "", "state_bytes": state_bytes(rounded)}
    with pytest.raises(RunError, match=r"^TF-519: .*a state that this silo has verified"):
        followed.advance(message, None, WEIGHTS)


@pytest.mark.parametrize("first", ["that state", "a crafted one", "none: the file is damaged"])
@pytest.mark.parametrize("total", ["told", "none"])
def test_no_state_is_vouched_for_that_rests_on_less_than_the_last(
    tmp_path: Path, run: Run, first: str, total: str
) -> None:
    """In another epoch the server names an older state twice, or a crafted one first."""
    followed = silo(tmp_path, run, "late")
    for step in (0, 1, 2):
        followed.advance(*run.request(step), WEIGHTS)
        gave(tmp_path, run, step)
    told = run.totals[2] if total == "told" else None
    older = [{**run.request(step)[0], **run.sent(step)} for step in (0, 1)]
    if first == "that state":
        older *= 2
    elif first == "a crafted one":
        crafted = run.states[2].evolve(model={name: value + 1 for name, value in run.states[2].model.items()})
        sent = {"state": state_sha256(crafted), "state_bytes": state_bytes(crafted), "before": "0" * 64}
        if told is None:
            with pytest.raises(RunError, match="takes part again"):
                followed.advance(sent, told, WEIGHTS)
        else:
            assert not followed.advance(sent, told, WEIGHTS)[1]
    else:
        (tmp_path / FOLLOWED).write_bytes(b"{}")
        followed = silo(tmp_path, run, "late")
    for message in older:
        with pytest.raises(RunError, match=r"^TF-518: .*summed once more"):
            followed.advance(message, told, WEIGHTS)
    if told is not None and first != "a crafted one":  # but it catches up
        assert same(followed.advance(run.request(3)[0] | run.sent(3), told, WEIGHTS)[0], run.states[3])


def test_nor_in_a_resumed_job_once_it_gave_shares_there(tmp_path: Path, run: Run) -> None:
    """It may begin a round earlier than this silo was: the server can have lost its last checkpoint."""
    for step in (0, 1, 2):
        gave(tmp_path, run, step)
    append_durably(tmp_path / VERIFIED, f"{RESUMED}\n".encode())
    resume = {"lineage": "j", "previous": "j", "after_round": 1, "checkpoint_sha256": "0" * 64}
    followed = FollowedState(tmp_path, job(resume=resume, summation="secure"), "a", logging.getLogger("test"))
    begun, older = ({**run.request(step)[0], **run.sent(step)} for step in (1, 0))
    for _ in range(2):
        assert followed.advance(begun, None, WEIGHTS)[1]
        gave(tmp_path, run, 1)
    for _ in range(2):
        with pytest.raises(RunError, match="summed once more"):
            followed.advance(older, None, WEIGHTS)
    again, total = run.request(2)  # the same total as in the job before
    assert followed.advance(again, total, WEIGHTS)[1] == (total.sum_id == sum_of(run, 1))


def test_a_pretrained_start_is_made_while_the_server_sends_it(tmp_path: Path, run: Run) -> None:
    weights = save({name: value + 1 for name, value in run.states[0].model.items()})
    named = job(initial_model_sha256=hashlib.sha256(weights).hexdigest())
    start = start_state(named, weights)[0]
    message = {"state": state_sha256(start), "before": ""}

    def asked(folder: str, **more: Any) -> tuple[ServerState, bool]:
        return FollowedState(tmp_path / folder, named, "a", logging.getLogger("test")).advance(
            message | more, None, WEIGHTS
        )

    state, follows = asked("first", start=weights)
    assert same(state, start) and follows
    with pytest.raises(NeedsStateError):
        asked("late")
    state, follows = asked("late", state_bytes=state_bytes(start))
    assert same(state, start) and not follows


def frozen(name: str = "secure", **values: Any) -> tuple[JobSetup, bytes]:
    """A job with a frozen encoder from a named start, and that start's weights."""
    drawn = job(encoder="random", model_options=WIDTHS).initial_state().model
    weights = save({name: value + 0.1 for name, value in drawn.items()})
    sha256 = hashlib.sha256(weights).hexdigest()
    return job(
        encoder="frozen", model_options=WIDTHS, initial_model_sha256=sha256, summation=name, **values
    ), weights


def test_the_named_start_is_kept_for_the_time_after_its_requests(tmp_path: Path) -> None:
    setup, weights = frozen()
    start = start_state(setup, weights)[0]
    message = {"state": state_sha256(start), "before": ""}
    followed = FollowedState(tmp_path, setup, "a", logging.getLogger("test"))
    followed.advance({**message, "start": weights}, None, WEIGHTS)
    assert same(FollowedState(tmp_path, setup, "a", logging.getLogger("test")).start({}), start)
    late = FollowedState(tmp_path / "late", setup, "a", logging.getLogger("test"))
    with pytest.raises(NeedsStateError):
        late.start({})
    assert same(late.start({"state_bytes": b"", "start": weights}), start)
    for other in ({"state_bytes": b""}, {"start": weights[:-1] + b"x"}):
        with pytest.raises(RunError, match=r"^TF-505: "):
            late.start(other)


@pytest.mark.parametrize("part", ["backbone", "head"])
def test_a_state_with_another_frozen_encoder_than_the_starts_is_refused(tmp_path: Path, part: str) -> None:
    """It is sent to a silo that missed an exchange, and that keeps features by the job's own encoder."""
    setup, weights = frozen()
    start = start_state(setup, weights)[0]
    followed = FollowedState(tmp_path, setup, "late", logging.getLogger("test"))
    followed.advance({"state": state_sha256(start), "before": "", "start": weights}, None, WEIGHTS)
    total = made_total(setup, next(iter(setup.plan)), start, 1)
    model = {name: value + float(name.startswith(part)) for name, value in start.model.items()}
    other = ServerState(model)
    message = {"state": state_sha256(other), "before": "0" * 64, "state_bytes": state_bytes(other)}
    if part == "head":
        assert same(followed.advance(message, total, WEIGHTS)[0], other)
        return
    with pytest.raises(RunError, match=r"^TF-518: .*frozen encoder of the job's start"):
        followed.advance(message, total, WEIGHTS)


def test_but_pooled_moments_are_no_part_of_it(tmp_path: Path) -> None:
    """They follow from totals, of which this silo missed one."""
    model = {"model": "mlp", "model_options": {"widths": [8], "standardise": True}}
    setup = job(dataset="fed_heart_disease", encoder="random", summation="secure", **model)
    start = setup.initial_state()
    followed = FollowedState(tmp_path, setup, "late", logging.getLogger("test"))
    followed.advance({"state": state_sha256(start), "before": ""}, None, WEIGHTS)
    tensors = {name: value + float("standardise" in name) for name, value in start.model.items()}
    assert any("standardise" in name for name in tensors)
    other = ServerState(tensors)
    message = {"state": state_sha256(other), "before": "0" * 64, "state_bytes": state_bytes(other)}
    missed = Total(0, SumId(0, "statistics-0"), "a schema", ("another",), {}, bytes(32))
    assert same(followed.advance(message, missed, WEIGHTS)[0], other)


def test_nor_is_a_verified_state_compared_with_a_start_that_is_gone(tmp_path: Path) -> None:
    values = {"lineage": "a", "previous": "a", "after_round": 1, "checkpoint_sha256": "0" * 64}
    setup, weights = frozen(resume=values)
    state = start_state(setup, weights)[0]
    note_verified(tmp_path, bytes.fromhex(state_sha256(state)), SumId(2, "train-0"))
    message = {"state": state_sha256(state), "before": "", "state_bytes": state_bytes(state)}
    followed = FollowedState(tmp_path, setup, "a", logging.getLogger("test"))
    assert followed.advance(message, None, WEIGHTS)[1]


def test_a_total_that_changes_nothing_is_followed(tmp_path: Path, run: Run) -> None:
    last, unchanged = len(run.states) - 1, state_sha256(run.states[-1])
    assert state_sha256(run.states[last - 1]) == unchanged, "the closing"
    followed = silo(tmp_path, run)
    for step in range(last):
        message, total = run.request(step)
        followed.advance(message, total, WEIGHTS)
        gave(tmp_path, run, step)
    assert followed.advance(*run.request(last), WEIGHTS)[1]


def test_a_silo_that_missed_exchanges_asks_and_does_not_vouch(tmp_path: Path, run: Run) -> None:
    followed = silo(tmp_path, run, "late")
    followed.advance(*run.request(0), WEIGHTS)
    message, total = run.request(2)
    with pytest.raises(NeedsStateError):
        followed.advance(message, total, WEIGHTS)
    state, follows = followed.advance(message | run.sent(2), total, WEIGHTS)
    assert same(state, run.states[2]) and not follows
    assert not followed.advance(message, total, WEIGHTS)[1]  # nor when asked again
    gave(tmp_path, run, 2)
    state, follows = followed.advance(*run.request(3), WEIGHTS)
    assert follows and same(state, run.states[3])  # it computes again from here on


@pytest.mark.parametrize("step", [0, 1])
def test_another_start_or_step_than_its_own_is_refused(tmp_path: Path, run: Run, step: int) -> None:
    followed = silo(tmp_path, run)
    for before in range(step):
        followed.advance(*run.request(before), WEIGHTS)
        gave(tmp_path, run, before)
    crafted = run.states[step].evolve(
        model={name: value * 1.01 for name, value in run.states[step].model.items()}
    )
    message, total = run.request(step)
    message |= {"state": state_sha256(crafted)}
    with pytest.raises(NeedsStateError):
        followed.advance(message, total, WEIGHTS)
    with pytest.raises(RunError, match=r"^TF-518: "):
        followed.advance(message | {"state_bytes": state_bytes(crafted)}, total, WEIGHTS)
    state, follows = followed.advance(*run.request(step), WEIGHTS)
    assert follows and same(state, run.states[step])  # the refusal changed nothing


@pytest.mark.parametrize("method", ["fedopt", "fedavg"])
def test_a_state_that_differs_by_rounding_is_taken_over_where_processors_round(
    tmp_path: Path, method: str
) -> None:
    """Where all have the same bits, a server would steer by steps that look like rounding."""
    run = Run(job(method=method))
    followed = silo(tmp_path, run)
    followed.advance(*run.request(0), WEIGHTS)
    gave(tmp_path, run, 0)
    rounded = run.states[1].evolve(
        model={name: value * (1 + 1e-6) for name, value in run.states[1].model.items()}
    )
    message, total = run.request(1, state=state_sha256(rounded), state_bytes=state_bytes(rounded))
    if method == "fedavg":
        with pytest.raises(RunError, match=r"^TF-518: .*no bit may"):
            followed.advance(message, total, WEIGHTS)
        return
    state, follows = followed.advance(message, total, WEIGHTS)
    assert follows and same(state, rounded)


def test_a_false_total_gives_another_state_than_the_servers(tmp_path: Path, run: Run) -> None:
    followed = silo(tmp_path, run)
    followed.advance(*run.request(0), WEIGHTS)
    message, total = run.request(1)
    assert total is not None
    altered = bytearray(total.groups["update"])
    altered[3] ^= 64
    false = replace(total, groups={**total.groups, "update": bytes(altered)})
    with pytest.raises(NeedsStateError):
        followed.advance(message, false, WEIGHTS)
    with pytest.raises(RunError, match="TF-518"):
        followed.advance(message | run.sent(1), false, WEIGHTS)


def test_what_is_sent_is_what_was_named_and_of_this_jobs_form(tmp_path: Path, run: Run) -> None:
    followed = silo(tmp_path, run, "late")
    message, total = run.request(2)
    with pytest.raises(RunError, match="TF-518"):
        followed.advance(message | run.sent(1), total, WEIGHTS)
    model = dict(run.states[2].model)
    for other in (
        {name: value for name, value in model.items() if name != "head.bias"},
        {**model, "more": torch.zeros(1)},
        {**model, "head.bias": torch.zeros(2)},
        {**model, "head.bias": model["head.bias"].double()},
    ):
        state = run.states[2].evolve(model=other)
        sent = {"state": state_sha256(state), "state_bytes": state_bytes(state)}
        with pytest.raises(RunError, match="TF-604"):
            followed.advance(message | sent, total, WEIGHTS)


def test_a_damaged_file_is_asked_for_again(tmp_path: Path, run: Run) -> None:
    for step in (0, 1):
        silo(tmp_path, run, "late").advance(*run.request(step), WEIGHTS)
    path = tmp_path / FOLLOWED
    whole = path.read_bytes()
    message, total = run.request(2)
    for damaged in (whole[:-7], whole[:-1] + bytes([whole[-1] ^ 1])):
        path.write_bytes(damaged)
        with pytest.raises(NeedsStateError):
            silo(tmp_path, run, "late").advance(message, total, WEIGHTS)
        path.write_bytes(damaged)
    assert not silo(tmp_path, run, "late").advance(message | run.sent(2), total, WEIGHTS)[1]


def test_a_resumed_run_goes_on_from_a_verified_state_alone(tmp_path: Path, run: Run) -> None:
    resume = {"lineage": "j", "previous": "j", "after_round": 1, "checkpoint_sha256": "0" * 64}
    later = job(resume=resume, summation="secure")
    message = {"state": state_sha256(run.states[1]), "before": ""} | run.sent(1)

    def resumed(folder: Path) -> bool:
        followed = FollowedState(folder, later, "a", logging.getLogger("test"))
        with pytest.raises(NeedsStateError):  # it has no start
            followed.advance(*run.request(2), WEIGHTS)
        return followed.advance(message, None, WEIGHTS)[1]

    gave(tmp_path / "other", run, 2)
    for folder in ("fresh", "other"):
        with pytest.raises(RunError, match=r"^TF-519: .*takes part again"):
            resumed(tmp_path / folder)
    gave(tmp_path / "own", run, 1)
    assert resumed(tmp_path / "own")


def test_a_state_is_serialised_once(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[ServerState] = []
    monkeypatch.setattr(
        f"{FollowedState.__module__}.state_bytes", lambda state: calls.append(state) or state_bytes(state)
    )
    own = silo(tmp_path, run)
    for step in range(3):
        message, total = run.request(step)
        own.advance(message, total, WEIGHTS)
        assert len(calls) == step + 1


def test_a_state_that_the_server_sent_is_stored_as_it_came(tmp_path: Path, run: Run) -> None:
    message, total = run.request(1, **run.sent(1))
    message["before"] = "0" * 64
    silo(tmp_path, run, "late").advance(message, total, WEIGHTS)
    assert (tmp_path / FOLLOWED).read_bytes().partition(b"\n")[2] == run.sent(1)["state_bytes"]


def evaluated(run: Run) -> tuple[JobSetup, bytes]:
    """A job that evaluates the start's model, and its file."""
    weights = save(dict(run.states[0].model))
    sha256 = hashlib.sha256(weights).hexdigest()
    return job(evaluate_only={}, rounds=0, initial_model_sha256=sha256, summation="secure"), weights


def test_a_job_that_evaluates_takes_the_named_model_alone(tmp_path: Path, run: Run) -> None:
    setup, weights = evaluated(run)
    start = start_state(setup, weights)[0]
    other = start.evolve(model={name: value + 1 for name, value in start.model.items()})

    def asked(folder: str, state: ServerState, **more: Any) -> tuple[ServerState, bool]:
        message = {"state": state_sha256(state), "before": "", "state_bytes": state_bytes(state), **more}
        followed = FollowedState(tmp_path / folder, setup, "a", logging.getLogger("test"))
        return followed.advance(message, None, WEIGHTS)

    for name, state, more, code in (
        ("late", start, {}, "TF-505"),
        ("a", other, {"start": weights}, "TF-518"),
    ):
        with pytest.raises(RunError) as caught:
            asked(name, state, **more)
        assert caught.value.code == code and "evaluate" in str(caught.value)
    assert same(asked("a", start, start=weights)[0], start)
    followed = FollowedState(tmp_path / "a", setup, "a", logging.getLogger("test"))
    note_verified(tmp_path / "a", bytes.fromhex(state_sha256(start)), SumId(0, "closing-0"))
    (exchange,) = setup.plan
    total = made_total(setup, exchange, start, 0)
    after = next_state(setup, start, total, WEIGHTS)
    message = {"state": state_sha256(after), "before": state_sha256(start)}
    assert same(followed.advance(message, total, WEIGHTS)[0], after), "what the seal rests on"


def test_a_state_of_the_job_before_is_not_vouched_for_behind_a_total(tmp_path: Path, run: Run) -> None:
    gave(tmp_path, run, 2)
    append_durably(tmp_path / VERIFIED, f"{RESUMED}\n".encode())
    resume = {"lineage": "j", "previous": "j", "after_round": 1, "checkpoint_sha256": "0" * 64}
    followed = FollowedState(
        tmp_path, job(resume=resume, summation="secure"), "late", logging.getLogger("test")
    )
    message, total = run.request(2)
    for _ in range(2):
        assert not followed.advance(message | run.sent(2), total, WEIGHTS)[1]


def test_a_start_is_not_vouched_for_after_later_states(tmp_path: Path, run: Run) -> None:
    gave(tmp_path, run, 1)
    assert not silo(tmp_path, run).advance(*run.request(0), WEIGHTS)[1]


def test_the_sum_behind_which_a_silo_is_is_told(tmp_path: Path, run: Run) -> None:
    followed = silo(tmp_path, run)
    assert followed.behind == ""
    followed.advance(*run.request(0), WEIGHTS)
    assert followed.behind == ""
    gave(tmp_path, run, 0)
    followed.advance(*run.request(1), WEIGHTS)
    assert followed.behind == str(run.totals[0].sum_id)


def test_a_pretrained_start_is_written_once_and_only_for_secure_sums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, written in (("secure", 1), ("plain", 0)):
        setup, weights = frozen(name)
        start, folder = start_state(setup, weights)[0], tmp_path / name
        message = {"state": state_sha256(start), "before": "", "start": weights}
        paths, write = list[str](), followed_state.write_atomically

        def noted(path: Path, data: bytes, mode: int, to: Any = paths, write: Any = write) -> None:
            to.append(path.name)
            write(path, data, mode=mode)

        monkeypatch.setattr(followed_state, "write_atomically", noted)
        for _ in range(2):
            FollowedState(folder, setup, "a", logging.getLogger("test")).advance(message, None, WEIGHTS)
            (folder / FOLLOWED).unlink()
        assert paths.count(PRETRAINED) == written
        monkeypatch.undo()


def test_a_start_that_no_file_names_is_drawn(tmp_path: Path, run: Run) -> None:
    assert same(silo(tmp_path, run).start({}), run.states[0])


def test_a_withdrawal_begins_with_the_state_that_its_job_names(tmp_path: Path, run: Run) -> None:
    digest = state_sha256(run.states[2])
    withdraw = {"lineage": "j", "previous": "j", "checkpoint_sha256": "0" * 64, "state_sha256": digest}
    values = {"method": "fedncm", "model": "random_features", "model_options": {"width": 4}, "rounds": 1}
    setup = job(**values, weights="exact", summation="secure", withdraw=withdraw)
    followed = FollowedState(tmp_path, setup, "a", logging.getLogger("test"))
    followed._check_named_by_job(digest)
    with pytest.raises(RunError, match=r"^TF-519: "):
        followed._check_named_by_job("0" * 64)


def rounded_start(run: Run) -> dict[str, Any]:
    """A request that names the start, but for rounding, as if no exchange had been before."""
    start = run.states[0]
    state = start.evolve(model={name: value * (1 + 1e-6) for name, value in start.model.items()})
    return {"state": state_sha256(state), "before": "", "state_bytes": state_bytes(state)}


def test_a_rounded_start_is_no_later_state(tmp_path: Path, run: Run) -> None:
    """Not after later states, whose file is lost; nor behind a total, which would sum the start twice."""
    gave(tmp_path / "past", run, 1)
    with pytest.raises(RunError, match=r"^TF-519: "):
        silo(tmp_path / "past", run).advance(rounded_start(run), None, WEIGHTS)
    followed = silo(tmp_path, run)
    followed.advance(*run.request(0), WEIGHTS)
    with pytest.raises(RunError, match="it missed nothing"):
        followed.advance(rounded_start(run), run.totals[0], WEIGHTS)


def test_a_sum_on_the_last_state_proves_nothing_of_an_older_one(tmp_path: Path, run: Run) -> None:
    """The silo gave shares of it on a state whose file is lost."""
    followed = silo(tmp_path, run)
    followed.advance(*run.request(0), WEIGHTS)
    for step in (0, 1):
        gave(tmp_path, run, step)
    later = run.totals[1]
    state = next_state(run.setup, run.states[0], later, WEIGHTS)
    message = {"state": state_sha256(state), "before": state_sha256(run.states[0])}
    assert not followed.advance(message, later, WEIGHTS)[1]


def test_a_state_that_was_taken_over_leads_to_no_other_without_a_total(tmp_path: Path, run: Run) -> None:
    late = silo(tmp_path, run, "late")
    message, total = run.request(2)
    late.advance(message | run.sent(2), total, WEIGHTS)
    assert total is not None and late.behind == str(total.sum_id)
    other = {"state": state_sha256(run.states[1]), "before": "0" * 64, **run.sent(1)}
    with pytest.raises(RunError, match=r"^TF-519: "):
        late.advance(other, None, WEIGHTS)


def test_in_plain_sums_a_silo_catches_up_without_a_total(tmp_path: Path) -> None:
    run = Run(job())
    late = silo(tmp_path, run, "late")
    late.advance(*run.request(0), WEIGHTS)
    message, total = run.request(2)
    late.advance(message | run.sent(2), total, WEIGHTS)
    again = {"state": state_sha256(run.states[1]), "before": "0" * 64, **run.sent(1)}
    assert same(late.advance(again, None, WEIGHTS)[0], run.states[1])
    setup, weights = frozen("plain")
    model = {name: value + 1 for name, value in start_state(setup, weights)[0].model.items()}
    other = ServerState(model)
    sent = {"state": state_sha256(other), "before": "0" * 64, "state_bytes": state_bytes(other)}
    followed = FollowedState(tmp_path / "frozen", setup, "late", logging.getLogger("test"))
    assert same(followed.advance(sent, None, WEIGHTS)[0], other), "no silo keeps the start for that"


def test_another_start_beside_the_one_kept_is_refused(tmp_path: Path) -> None:
    setup, weights = frozen()
    message = {"state": state_sha256(start_state(setup, weights)[0]), "before": "", "start": weights}
    followed = FollowedState(tmp_path, setup, "a", logging.getLogger("test"))
    followed.advance(message, None, WEIGHTS)
    with pytest.raises(RunError, match=r"^TF-505: "):
        followed.start({"start": weights[:-1] + b"x"})
