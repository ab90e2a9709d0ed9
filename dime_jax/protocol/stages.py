"""Calibrate, then test: the paper's protocol in stages that can be run apart, killed, and repeated without a model.

    RUN/run.json, RUN/halves.npz    what is run: attacks, grid, seed; who is member, who is held out, which half, and
                                    which of them belong together                                 begin
    RUN/model_check.json            whether the model is a denoiser at all                        guard
    RUN/model_answer.json           by what it is known again, if not by its weights              guard
    RUN/statistics.npz, .json       what the pictures themselves say about their difficulty       run
    RUN/calibration/                score table of the calibration half, over the whole grid      score
    RUN/calibration.json            every attack's frozen setting, angle and threshold, plain
                                    and adjusted for the difficulty of pictures                   calibrate
    RUN/test/                       score table of the test half, at the frozen settings only     score
    RUN/results.json                the test half's metrics                                       evaluate

`run` takes these stages in their order, or some of them. The calibration half chooses everything. The test half is
scored after the choice is on disk, and read once. In both halves a witness of fixed direction is asked besides, which
says whether members and held-out images are the right way round (`evidence.direction`). The first process
writes all files but shards and ledgers.

run.json holds the digest of halves.npz, calibration.json those of all that it was made from (see `digests`).
"""

import os
import pathlib
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import numpy as np

from dime_jax import data, evidence, scoring
from dime_jax._util import digests, files, records, validate
from dime_jax._util.distributed import on_first_process
from dime_jax.attacks import Setting, attack_names, describe_attack, get_attack
from dime_jax.attacks.loss_level import NAME, setting_for
from dime_jax.core.denoiser import Denoiser
from dime_jax.core.schedule import NoiseSchedule
from dime_jax.data import Halves, Pair, Split
from dime_jax.data.groups import ALONE
from dime_jax.evidence.metrics import Groups
from dime_jax.guards import identity, model_check
from dime_jax.protocol import calibration, statistics
from dime_jax.protocol.calibration import Calibration, Outcome, TermPair, calibrate, evaluate
from dime_jax.protocol.evaluation import SCHEMA_VERSION, AdjustedRow, AtThreshold, Evaluation, ResultRow, check_version
from dime_jax.protocol.statistics import Statistics
from dime_jax.scoring import score_table
from dime_jax.scoring.planning import Job, witness_jobs
from dime_jax.scoring.score_table import ScoreTable

HALVES = Halves._fields
MANIFESTS = {half: f"{half}/manifest.json" for half in HALVES}
STAGES = ("calibration", "calibrate", "test", "evaluate")
# What calibration.json is made from, and goes with.
CALIBRATION_FILES = ("run.json", "halves.npz", MANIFESTS["calibration"])


class _Run(NamedTuple):
    """run.json: attacks by name with their settings."""

    seed: int
    jobs: list[tuple[str, Setting]]
    witness: list[tuple[str, Setting]]


def run(
    directory: str | os.PathLike[str],
    denoiser: Denoiser,
    source: data.Source,
    halves: Halves,
    jobs: Sequence[Job],
    *,
    heldout: np.ndarray | None = None,
    candidates: np.ndarray | None = None,
    groups: np.ndarray | None = None,
    seed: int = 0,
    transform: data.Transform | None = None,
    options: scoring.ScoringOptions | None = None,
    take: Sequence[str] = STAGES,
    say: Callable[[str], object] = lambda text: None,
    hooks: scoring.Hooks = scoring.NO_HOOKS,
) -> scoring.Hooks:
    """Begin a run or continue it, guard it, and take its stages; what was finished before costs nothing again.

    The guards, in their order: each source's own transform (`data.roles`), whether the model is a denoiser, whether it
    is the same one (`guard`), the witness of direction, asked with each half and read by `read_direction`, and the
    budget of `options`, which is that of the whole run.

    Args:
      directory: of the run.
      denoiser: the model.
      source: the images.
      halves: who chooses, and who is tested.
      jobs: every attack and setting to choose from.
      heldout: images that the model was not trained on, to check it with; those of the halves if None.
      candidates: further images that will be asked about.
      groups: see `begin`.
      seed: of all draws.
      transform: preprocessing; the source's own, or `fit`, if None.
      options: how to run.
      take: some of STAGES, in their order. Callers that write more than the rows to results.json leave "evaluate" out.
      say: is told at once if the model is no denoiser; what that means is for the caller to decide.
      hooks: what to call meanwhile.

    Returns:
      The hooks with which everything else in the run is asked: a model that was exchanged is noticed.
    """
    directory = begin(directory, jobs, halves, seed, groups=groups)
    together = halves.together()
    known = together.heldout if heldout is None else heldout
    hooks = guard(
        directory, denoiser, source, known, transform=transform, seed=seed, options=options, say=say, hooks=hooks
    )
    asked = np.concatenate([*together.sides, known, *([] if candidates is None else [candidates])])
    statistics.make(directory, source, asked, transform or data.transform_for(source, denoiser.image_shape))
    for stage in take:
        if stage == "calibrate":
            calibrate_run(directory)
        elif stage == "evaluate":
            evaluate_run(directory)
        else:
            score_half(directory, stage, denoiser, source, transform=transform, options=options, hooks=hooks)
    return hooks


def guard(
    directory: str | os.PathLike[str],
    denoiser: Denoiser,
    source: data.Source,
    heldout: np.ndarray,
    *,
    transform: data.Transform | None = None,
    seed: int = 0,
    options: scoring.ScoringOptions | None = None,
    say: Callable[[str], object] = lambda text: None,
    hooks: scoring.Hooks = scoring.NO_HOOKS,
) -> scoring.Hooks:
    """Check that the model is a denoiser, and that it is the one that the run was begun with.

    Arguments and what is returned as for `run`.

    Raises:
      ValueError: for another model than that.
    """
    options = options or scoring.ScoringOptions()
    check = model_check.check_once(
        directory, denoiser, source, heldout, transform=transform, seed=seed, options=options
    )
    if not check.passed:
        say(f"warning: {check.summary}")
    return identity.guard(directory, denoiser, options, hooks)


def begin(
    directory: str | os.PathLike[str],
    jobs: Sequence[Job],
    halves: Halves,
    seed: int = 0,
    *,
    groups: np.ndarray | None = None,
) -> pathlib.Path:
    """Write down what will be run; a directory that holds another run is refused.

    Args:
      directory: of the run.
      jobs: every attack and setting to choose from.
      halves: who chooses, and who is tested.
      seed: of all draws.
      groups: of all images of the source [n], -1 for one on its own: images that belong together, which intervals allow
        for. None for a run that has its groups already, or has none.

    Raises:
      ValueError: for another run, or an empty side.
    """
    directory = pathlib.Path(directory)
    columns, run = _columns(halves, groups), _Run(seed, _named(jobs), _named(witness_jobs(jobs)))
    for name, column in columns.items():
        validate.check_not_empty(column, name)

    def write() -> None:
        if is_begun(directory):
            if _read_run(directory) != run:
                raise ValueError(f"{directory} holds a run with another seed, other attacks or settings")
            stored = _read_columns(directory)
            if not all(np.array_equal(stored[name], column) for name, column in columns.items() if name in stored):
                raise ValueError(f"{directory} holds a run with other members, held-out images, groups or halves")
            return
        later = [name for name in (MANIFESTS["calibration"], "calibration.json") if (directory / name).exists()]
        if later:
            raise digests.Damaged(f"{directory / 'run.json'} is missing, and {later[0]} goes with it")
        directory.mkdir(parents=True, exist_ok=True)
        files.write_atomically(directory / "halves.npz", digests.dump_arrays(columns, compress=True))
        digests.write(directory / "run.json", records.plain_object(run), ["halves.npz"])

    on_first_process(write)
    return directory


def is_begun(directory: str | os.PathLike[str]) -> bool:
    """Whether there is a run in this directory."""
    return (pathlib.Path(directory) / "run.json").exists()


def read_halves(directory: pathlib.Path) -> Halves:
    """Members and held-out images of each half."""
    columns = _read_columns(directory)
    return Halves(*(Split(columns[f"{half}_member"], columns[f"{half}_heldout"]) for half in HALVES))


def read_groups(directory: pathlib.Path) -> np.ndarray | None:
    """The groups of the run's images by position, -1 for one on its own; None for a run that has none stored."""
    return _read_columns(directory).get("groups")


def score_half(
    directory: str | os.PathLike[str],
    half: str,
    denoiser: Denoiser,
    source: data.Source,
    *,
    transform: data.Transform | None = None,
    options: scoring.ScoringOptions | None = None,
    hooks: scoring.Hooks = scoring.NO_HOOKS,
) -> ScoreTable:
    """Score one half: "calibration" over the whole grid, "test" at the settings that calibration froze.

    A budget in `options` is that of the whole run: of the check of the model, both halves and all other tables in it.
    """
    directory = pathlib.Path(directory)
    validate.check_choice(half, HALVES, "half")
    run, split = _read_run(directory), getattr(read_halves(directory), half)
    if half == "test":
        jobs = [frozen_job(frozen) for frozen in (*read_calibrations(directory), *read_adjusted(directory))]
        calibrated = score_table.read_manifest(directory / "calibration")["identity"]["model"]
        if denoiser.fingerprint != calibrated:
            raise ValueError(f"{directory} was calibrated on model {calibrated}, this is {denoiser.fingerprint}")
    else:
        jobs = _jobs(run.jobs)
    return scoring.score(
        denoiser,
        source,
        jobs + _jobs(run.witness),
        directory / half,
        indices=shuffled(np.concatenate([split.member, split.heldout]), run.seed),
        transform=transform,
        seed=run.seed,
        options=(options or scoring.ScoringOptions()).within(directory),
        hooks=hooks,
    )


def shuffled(indices: np.ndarray, seed: int) -> np.ndarray:
    """Images of different roles in one random order, for `scoring.score`.

    They then share batches, so that nothing about a batch (its rounding, its hour) tells the roles apart. That is not
    pedantry: where a term is nearly constant, standardising it turns the rounding of a batch's shape into a score.
    """
    return np.random.default_rng(seed).permutation(np.sort(indices))


def calibrate_run(directory: str | os.PathLike[str]) -> list[Calibration]:
    """Freeze every attack at every query tier from the calibration half's table; writes calibration.json.

    The witness of direction comes last, where it was not among the attacks that were asked for.
    """
    directory = pathlib.Path(directory)

    def write() -> None:
        asked = asked_labels(directory)
        jobs = [*read_jobs(directory), *(job for job in _jobs(_read_run(directory).witness) if job.label not in asked)]
        frozen = _calibrate_each(directory, jobs, _row_of)
        contents = {"schema_version": SCHEMA_VERSION, "calibrations": records.plain(frozen)}
        pictures = statistics.exist(directory)
        if pictures:
            adjusted = _calibrate_each(directory, jobs, _row_of, statistics.read(directory))
            contents["adjusted"] = records.plain(adjusted)
        made_from = (*CALIBRATION_FILES, *([statistics.FILE] if pictures else []))
        digests.write(directory / "calibration.json", contents, made_from)

    on_first_process(write)
    return read_calibrations(directory)


def _row_of(job: Job) -> Hashable:
    return job.attack.name, job.setting.get("q")


def calibrations_by_timestep(directory: str | os.PathLike[str]) -> list[Calibration]:
    """What calibration would have chosen if only one timestep had been allowed, for every attack, tier and timestep.

    Attacks that are not known here are left out.
    """
    directory, known = pathlib.Path(directory), attack_names()
    jobs = _jobs([named for named in _read_run(directory).jobs if named[0] in known])
    return _calibrate_each(directory, jobs, lambda job: (job.attack.name, job.setting.get("q"), job.setting.get("t")))


def asked_labels(directory: str | os.PathLike[str]) -> set[str]:
    """The rows that were asked for, as "attack@queries"; the witness of direction may be one more."""
    return {job.label for job in read_jobs(directory)}


def read_jobs(directory: str | os.PathLike[str]) -> list[Job]:
    """Every attack and setting that calibration chooses from."""
    return _jobs(_read_run(pathlib.Path(directory)).jobs)


def read_direction(
    directory: str | os.PathLike[str], halves: Sequence[str] = HALVES, groups: np.ndarray | None = None
) -> evidence.Direction:
    """What the witness says about members and held-out images, from the score tables of these halves.

    A choice that must not depend on the test half is made from the calibration half alone; the bounds are those for
    both, so that the same AUC is judged the same.

    Args:
      directory: of the run.
      halves: names of some halves.
      groups: of all images of the source [n], which bounds allow for; those that are stored in the run if None.
    """
    directory = pathlib.Path(directory)
    groups = read_groups(directory) if groups is None else groups
    witness, splits = _jobs(_read_run(directory).witness), read_halves(directory)
    pictures = statistics.read(directory) if statistics.exist(directory) else None
    scores = []
    for half in halves:
        table = score_table.read_table(directory / half)
        for job in witness:
            split, t = getattr(splits, half), int(job.setting["t"])
            (member, heldout), grouped = term_pair(table, job, split), _groups(table, job, split, groups)
            scores.append(evidence.WitnessScores(half, t, member[0], heldout[0], grouped))
            if pictures is not None and member.size and heldout.size:
                left = _without_difficulty(Pair(member, heldout), statistics_pair(table, job, split, pictures))
                scores.append(evidence.WitnessScores(half, t, *left, grouped, adjusted=True))
    ways = 1 if pictures is None else 2
    return evidence.judge_direction(scores, looks=ways * len(witness) * len(HALVES))


def _without_difficulty(terms: TermPair, pictures: Pair[np.ndarray]) -> Pair[np.ndarray]:
    """The witness's scores after what the pictures explain, from one fit over members and held-out images alike."""
    left = evidence.difficulty_residuals(calibration.log_of(np.concatenate(terms, axis=1)[0]), np.concatenate(pictures))
    return Pair(left[: terms.member.shape[1]], left[terms.member.shape[1] :])


def _calibrate_each(
    directory: pathlib.Path,
    jobs: Sequence[Job],
    key: Callable[[Job], Hashable],
    pictures: Statistics | None = None,
) -> list[Calibration]:
    """One calibration for each group of jobs with the same key, in the order of the grid; adjusted with `pictures`."""
    table = score_table.read_table(directory / "calibration")
    split, schedule = read_halves(directory).calibration, table.schedule
    rows: dict[Hashable, list[Job]] = {}
    for job in jobs:
        rows.setdefault(key(job), []).append(job)
    frozen = []
    for row in rows.values():
        settings, terms = [job.setting for job in row], [term_pair(table, job, split) for job in row]
        known = None if pictures is None else [statistics_pair(table, job, split, pictures) for job in row]
        frozen.append(calibrate(row[0].attack, schedule, settings, terms, known))
    return frozen


def read_calibrations(directory: str | os.PathLike[str]) -> list[Calibration]:
    """The frozen attacks of calibration.json, each with its plain score."""
    return _read_frozen(directory, "calibrations")


def read_adjusted(directory: str | os.PathLike[str]) -> list[Calibration]:
    """The frozen attacks of calibration.json, adjusted for the difficulty of pictures; none in a run without that."""
    return _read_frozen(directory, "adjusted")


def _read_frozen(directory: str | os.PathLike[str], key: str) -> list[Calibration]:
    path = pathlib.Path(directory) / "calibration.json"
    contents = _read_sealed(path).check().contents
    check_version(path, contents)
    return records.parse(list[Calibration], contents.get(key, []), f"{path}: {key}")


def fixed_rule(schedule: NoiseSchedule, setting: Setting | None = None) -> Calibration:
    """The rule for audits without known members, at the setting that the schedule calls for."""
    setting = setting_for(schedule) if setting is None else setting
    return calibration.fixed_rule(get_attack(NAME), schedule, setting)


def evaluate_run(directory: str | os.PathLike[str]) -> Evaluation:
    """The frozen attacks on the test half's table; writes results.json and returns what it holds."""
    results = evaluation(directory)
    on_first_process(lambda: files.write_json(pathlib.Path(directory) / "results.json", records.plain(results)))
    return results


def evaluation(directory: str | os.PathLike[str], groups: np.ndarray | None = None) -> Evaluation:
    """What `evaluate_run` writes; intervals allow for the groups of all images [n], by default those of the run."""
    directory = pathlib.Path(directory)
    table, seed = score_table.read_table(directory / "test"), _read_run(directory).seed
    groups = read_groups(directory) if groups is None else groups
    split = read_halves(directory).test
    pictures = statistics.read(directory) if statistics.exist(directory) else None

    def outcome_of(frozen: Calibration) -> Outcome:
        return outcome(table, frozen, split, seed, groups, pictures)

    adjusted = {frozen.label: outcome_of(frozen) for frozen in read_adjusted(directory)}
    rows, excluded = [], 0
    for frozen in read_calibrations(directory):
        pair = term_pair(table, frozen_job(frozen), split)
        excluded = max(excluded, len(table.index) - pair.member.shape[1] - pair.heldout.shape[1])
        seconds = frozen.queries * table.seconds_per_query
        rows.append(result_row(outcome_of(frozen), seconds, adjusted.get(frozen.label)))
    calibration_half = score_table.read_table(directory / "calibration")
    about = table.manifest["identity"]
    check = model_check.read_check(directory, about["model"])
    warnings = [f"{excluded} of {len(table.index)} test images were left out: unreadable or no finite answer"]
    return Evaluation(
        results=tuple(rows),
        fingerprints={
            "model": about["model"],
            "calibration_data": calibration_half.manifest["identity"]["data"],
            "test_data": about["data"],
        },
        precision=about["precision"],
        seed=seed,
        queries_made=calibration_half.queries_made + table.queries_made + (check.queries if check else 0),
        model_check=check,
        direction=read_direction(directory, groups=groups),
        warnings=tuple(warnings if excluded else ()),
    )


def outcome(
    table: ScoreTable,
    frozen: Calibration,
    split: Split,
    seed: int,
    groups: np.ndarray | None = None,
    pictures: Statistics | None = None,
) -> Outcome:
    """A frozen attack on the images of a split, which a table has scores of.

    Args:
      table: with the attack's terms.
      frozen: the attack.
      split: members and held-out images.
      seed: of resampling.
      groups: of all images [n], which intervals allow for.
      pictures: their statistics, if the score is adjusted.
    """
    job = frozen_job(frozen)
    known = None if frozen.plain or pictures is None else statistics_pair(table, job, split, pictures)
    grouped = _groups(table, job, split, groups)
    return evaluate(frozen, term_pair(table, job, split), seed=seed, groups=grouped, statistics=known)


def frozen_job(frozen: Calibration) -> Job:
    """What to ask the model for a frozen attack; one that is not known here has nothing but its stored terms."""
    return Job(describe_attack(frozen.attack), frozen.setting)


def frozen_scores(
    table: ScoreTable, frozen: Calibration, indices: np.ndarray, pictures: Statistics | None = None
) -> np.ndarray:
    """Scores [n] of some images of a table by a frozen attack, lower for members; NaN without a finite answer.

    Args:
      table: with the attack's terms.
      frozen: the attack.
      indices: which images.
      pictures: their statistics, if the score is adjusted.
    """
    known = None if frozen.plain or pictures is None else pictures.of(indices)
    return frozen.score(terms_of(table, frozen, indices), known)


def terms_of(table: ScoreTable, frozen: Calibration, indices: np.ndarray) -> np.ndarray:
    """Terms [columns, n] of some images of a table; all NaN without a finite answer."""
    terms = table.terms(frozen_job(frozen))
    place = {int(index): row for row, index in enumerate(table.index)}
    terms = terms[:, [place[int(index)] for index in indices]]
    return np.where(np.all(np.isfinite(terms), axis=0), terms, np.nan)


def result_row(outcome: Outcome, seconds: float, adjusted: Outcome | None = None) -> ResultRow:
    """One row of the results; `adjusted` is the same attack with the difficulty of pictures taken out."""
    frozen, metrics = outcome.calibration, outcome.metrics
    return ResultRow(
        attack=frozen.attack,
        setting={**frozen.setting, **frozen.parameters},
        auc=metrics.auc,
        asr=metrics.asr,
        tpr_at_1pct_fpr=metrics.tpr_at_fpr[0.01],
        attained_fpr=metrics.attained_fpr[0.01],
        false_positives=metrics.false_positives[0.01],
        at_threshold=_at_threshold(outcome),
        queries_per_image=frozen.queries,
        seconds_per_image=seconds,
        adjusted=None if adjusted is None else _adjusted_row(adjusted),
    )


def _adjusted_row(outcome: Outcome) -> AdjustedRow:
    metrics, setting = outcome.metrics, outcome.calibration.setting
    return AdjustedRow(setting, metrics.auc, metrics.asr, metrics.tpr_at_fpr[0.01], _at_threshold(outcome))


def _at_threshold(outcome: Outcome) -> AtThreshold:
    rates = outcome.at_threshold
    return AtThreshold(outcome.calibration.threshold, rates.tpr, rates.fpr)


def _columns(halves: Halves, groups: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """The arrays of halves.npz; `groups`, by position, is left out where every image is on its own."""
    columns = {f"{half}_{side}": at for half in HALVES for side, at in getattr(halves, half).sides._asdict().items()}
    if groups is not None:
        used = np.concatenate(list(columns.values()))
        own = np.full(1 + used.max(), ALONE, np.int64)
        own[used] = groups[used]
        columns |= {"groups": own} if np.any(own != ALONE) else {}
    return columns


def _read_columns(directory: pathlib.Path) -> dict[str, np.ndarray]:
    return _read_sealed(directory / "run.json").read_arrays("halves.npz")


def _jobs(named: Sequence[tuple[str, Setting]]) -> list[Job]:
    return [Job(get_attack(name), setting) for name, setting in named]


def _named(jobs: Sequence[Job]) -> list[tuple[str, Setting]]:
    return [(job.attack.name, dict(job.setting)) for job in jobs]


def _read_run(directory: pathlib.Path) -> _Run:
    path = directory / "run.json"
    return records.parse(_Run, _read_sealed(path).check().contents, str(path))


def term_pair(table: ScoreTable, job: Job, split: Split) -> TermPair:
    """Terms of the images with a finite answer, members and held-out images apart."""
    terms = table.terms(job)
    return _usable(table, job, split).map(lambda usable: terms[:, usable])


def statistics_pair(table: ScoreTable, job: Job, split: Split, pictures: Statistics) -> Pair[np.ndarray]:
    """The statistics [n, k] of the images of `term_pair`."""
    return _usable(table, job, split).map(lambda usable: pictures.of(table.index[usable]))


def _groups(table: ScoreTable, job: Job, split: Split, groups: np.ndarray | None) -> Groups:
    """The groups of the images of `term_pair`, from those of all images."""
    if groups is None:
        return None, None
    return _usable(table, job, split).map(lambda usable: groups[table.index[usable]])


def _usable(table: ScoreTable, job: Job, split: Split) -> Pair[np.ndarray]:
    """Which rows of the table are members, and which held-out images, with a finite answer."""
    finite = np.all(np.isfinite(table.terms(job)), axis=0)
    return split.sides.map(lambda side: finite & np.isin(table.index, side))


def _read_sealed(path: pathlib.Path) -> digests.Sealed:
    """A JSON file of the run; if it was never written, the error says which stage comes first."""
    try:
        return digests.read(path)
    except FileNotFoundError:
        before = {"run.json": "start a run", "calibration.json": "calibrate"}[path.name]
        raise ValueError(f"no {path}: {before} first") from None
