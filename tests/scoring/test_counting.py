"""Queries, budgets, retries and flagged images: exact counts, with a model that counts for itself."""

import numpy as np
import pytest
from tiny_model import FEW, SCHEDULE, function, images, network, quiet, source

import dime_jax as dj
from dime_jax import attacks, scoring
from dime_jax.scoring import planning, score_table
from dime_jax.scoring.query_ledger import Budget, BudgetExceeded, queries_made
from dime_jax.scoring.score_table import NOT_FINITE, UNREADABLE

PLAN = planning.make_plan(FEW, SCHEDULE)
NO_WAIT = scoring.Retry(attempts=3, first_wait=0.0, longest_wait=0.0)


class Counting:
    """A model that counts the images it sees, and fails on the given calls."""

    def __init__(self, failing=(), error=None):
        self.images, self.calls, self.failing, self.error = 0, 0, failing, error or ConnectionError("busy")

    def __call__(self, x, t):
        self.calls += 1
        self.images += len(x)
        if self.calls in self.failing:
            raise self.error
        return np.tanh(np.asarray(x))


def run(model, path, jobs=FEW, **options):
    options = quiet(**{"micro_batch": 4, "retry": NO_WAIT, **options})
    return scoring.score(function(model), source(), jobs, path, options=options)


def test_queries_made_is_exact_with_sharing(tmp_path):
    model = Counting()
    table = run(model, tmp_path)
    assert PLAN.queries_per_image == 1 + 2 + 1 + 2 + 2  # loss, pia, sima, and dime at two t
    assert table.queries_made == model.images == 21 * PLAN.queries_per_image
    again = Counting()
    assert run(again, tmp_path).queries_made == model.images
    assert again.images == 0


def test_queries_made_is_the_sum_without_sharing(tmp_path):
    for i, job in enumerate(FEW):
        model = Counting()
        assert run(model, tmp_path / str(i), jobs=[job]).queries_made == model.images == 21 * job.queries


def test_padding_costs_nothing_on_a_network_either(tmp_path):
    model = network()
    table = scoring.score(model, source(), FEW, tmp_path, options=quiet(micro_batch=4))
    assert table.queries_made == model.queries.count == 21 * PLAN.queries_per_image


def test_every_retry_is_counted(tmp_path, capsys):
    model = Counting(failing=(2, 3, 11))
    options = scoring.ScoringOptions(micro_batch=4, retry=NO_WAIT)
    table = scoring.score(function(model), source(), FEW, tmp_path, options=options)
    assert model.images == table.queries_made == 21 * PLAN.queries_per_image + 3 * 4
    assert capsys.readouterr().err.count("the model failed: ConnectionError('busy')") == 3


@pytest.mark.parametrize(
    ("error", "calls"), [(ConnectionError("busy"), 3), (ValueError("wrong shape"), 1), (TypeError("no"), 1)]
)
def test_retries_are_capped_and_bad_input_is_not_retried(tmp_path, error, calls):
    model = Counting(failing=range(9, 99), error=error)
    with pytest.raises(type(error), match=str(error)):
        run(model, tmp_path)
    assert model.calls == 8 + calls
    assert queries_made(tmp_path) == model.images
    healthy = Counting()
    table = run(healthy, tmp_path)  # the first batch's eight calls are not asked again
    assert healthy.images == (21 - 4) * PLAN.queries_per_image
    assert table.queries_made == model.images + healthy.images


class TestBudget:
    def test_an_exact_budget_is_enough(self, tmp_path):
        model = Counting()
        run(model, tmp_path, budget=Budget(21 * PLAN.queries_per_image, PLAN.queries_per_image))
        assert model.images == 21 * PLAN.queries_per_image

    @pytest.mark.parametrize(
        ("budget", "message"),
        [
            (Budget(total=167), "this takes 168 queries, but the budget of 167 has 167 left"),
            (Budget(per_image=7), "the budget allows 7 queries per image, but the plan takes 8"),
        ],
    )
    def test_a_plan_beyond_it_is_refused_before_the_first_query(self, tmp_path, budget, message):
        model = Counting()
        with pytest.raises(BudgetExceeded, match=message):
            run(model, tmp_path, budget=budget)
        assert model.images == 0

    def test_a_smaller_budget_than_was_spent_has_nothing_left(self, tmp_path):
        with pytest.raises(ConnectionError):
            run(Counting(failing=range(12, 99)), tmp_path, retry=NO_WAIT._replace(attempts=1))
        with pytest.raises(BudgetExceeded, match=r"this takes [0-9]+ queries, but the budget of 10 has 0 left"):
            run(Counting(), tmp_path, budget=Budget(total=10))

    @pytest.mark.parametrize("budget", [Budget(total=10), Budget(per_image=1)])
    def test_what_is_finished_needs_no_budget(self, tmp_path, budget):
        run(Counting(), tmp_path)
        model = Counting()
        assert run(model, tmp_path, budget=budget).queries_made == 21 * PLAN.queries_per_image
        assert model.images == 0

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"micro_batch": 0}, "micro_batch must be >= 1, got 0"),
            ({"budget": Budget(-1)}, "budget total must be >= 0, got -1"),
        ],
    )
    def test_options_that_mean_nothing_are_refused(self, options, message):
        with pytest.raises(ValueError, match=message):
            scoring.ScoringOptions(**options)

    def test_retries_cannot_exceed_it(self, tmp_path):
        model = Counting(failing=(1,))
        with pytest.raises(BudgetExceeded, match="the query budget is used up"):
            run(model, tmp_path, budget=Budget(total=21 * PLAN.queries_per_image))
        assert model.images == queries_made(tmp_path) <= 21 * PLAN.queries_per_image

    def test_retries_cannot_exceed_it_for_one_image(self, tmp_path):
        model = Counting(failing=(1,))
        with pytest.raises(BudgetExceeded, match="the budget allows 8 queries per image, but one more is needed"):
            run(model, tmp_path, budget=Budget(per_image=8))

    def test_it_holds_across_resumes(self, tmp_path):
        total = 21 * PLAN.queries_per_image + 6
        model = Counting(failing=range(12, 99))
        with pytest.raises(ConnectionError):
            run(model, tmp_path, budget=Budget(total=total), retry=NO_WAIT._replace(attempts=1))
        # Four queries failed and so did 0..7 units' worth that was under way: what is left must cover the rest.
        left = total - model.images
        second = Counting()
        rest = 21 * PLAN.queries_per_image - (model.images - 4)
        table = run(second, tmp_path, budget=Budget(total=total))
        assert second.images == rest <= left
        assert table.queries_made == model.images + second.images <= total


class TestFlagged:
    def model(self, bad):
        """NaN for images whose first pixel is one of `bad`."""

        def eps(x, t):
            x = np.asarray(x)
            return np.where(np.isin(x[:, :1, :1], bad), np.nan, x)

        return function(eps)

    @pytest.fixture
    def many(self):
        pixels = images(300)
        pixels[:, 0, 0] = 128
        pixels[[5, 17], 0, 0] = 255
        return pixels

    def test_answers_that_are_not_finite_are_flagged(self, tmp_path, many):
        jobs = [planning.Job(attacks.get_attack("sima_l4"), {"t": 70})]
        table = scoring.score(self.model([1.0]), dj.data.from_images(many), jobs, tmp_path, options=quiet())
        assert np.flatnonzero(table.status == NOT_FINITE).tolist() == [5, 17]
        assert np.flatnonzero(np.isnan(table.terms(jobs[0])[0])).tolist() == [5, 17]

    def test_above_ten_per_cent_the_run_stops_with_its_rows_stored(self, tmp_path, many):
        jobs = [planning.Job(attacks.get_attack("sima_l4"), {"t": 70})]
        many[100:129, 0, 0] = 255
        with pytest.raises(
            ValueError,
            match=r"too many images without an answer: must be <= 10% of 300, got 31 so far \(31 not finite\)",
        ):
            scoring.score(self.model([1.0]), dj.data.from_images(many), jobs, tmp_path, options=quiet(micro_batch=4))
        assert list((tmp_path / "shards").glob("*.parquet"))
        with pytest.raises(ValueError, match="is not complete"):
            score_table.read_table(tmp_path)

    def test_tolerated_images_stop_nobody(self, tmp_path, many):
        jobs = [planning.Job(attacks.get_attack("sima_l4"), {"t": 70})]
        many[100:200, 0, 0] = 255
        source, tolerated = dj.data.from_images(many), np.arange(100, 200)
        table = scoring.score(self.model([1.0]), source, jobs, tmp_path, tolerated=tolerated, options=quiet())
        assert np.flatnonzero(table.status == NOT_FINITE).tolist() == [5, 17, *range(100, 200)]
        many[200:220, 0, 0] = 255
        with pytest.raises(ValueError, match="too many images without an answer: must be <= 10% of 200, got 21 so far"):
            scoring.score(
                *(self.model([1.0]), dj.data.from_images(many), jobs, tmp_path / "again"),
                tolerated=tolerated,
                options=quiet(micro_batch=1),
            )

    def test_unreadable_images_are_flagged_and_cost_nothing(self, tmp_path, many):
        def read(index):
            if index in (7, 299):
                raise dj.data.BadImage("truncated")
            return many[index]

        broken = dj.data.Source("broken", dj.data.from_images(many).ids, read)
        jobs = [planning.Job(attacks.get_attack("sima_l4"), {"t": 70})]
        table = scoring.score(network(), broken, jobs, tmp_path, options=quiet())
        assert np.flatnonzero(table.status == UNREADABLE).tolist() == [7, 299]
        assert np.flatnonzero(np.isnan(table.terms(jobs[0])[0])).tolist() == [7, 299]
        assert table.queries_made == 298
