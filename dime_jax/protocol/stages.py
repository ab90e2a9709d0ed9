"""Calibrate, then test: the paper's protocol in stages that can be run apart, killed, and repeated without a model.

    RUN/run.json, RUN/halves.npz    what is run: attacks, grid, seed; who is member, who is held out, which half, and
                                    which of them belong together                                 begin
    RUN/model_check.json            whether the model is a denoiser at all                        guard
    RUN/model_answer.json           by what it is known again, if not by its weights              guard
    RUN/statistics.npz, .json       what the pictures themselves say about their difficulty       run
    RUN/calibration/                score table of the calibration half, over the whole grid      score
    RUN/calibration.json            every attack's frozen setting, angle and threshold, plain
                                    and with what pictures explain taken out                      calibrate
    RUN/test/                       score table of the test half, at the frozen settings only     score
    RUN/results.json                the test half's metrics                                       evaluate
    RUN/reference/                  what a second model was asked besides (`beside`)              guard, score

`run` takes these stages in their order, or some of them. The calibration half chooses everything. The test half is
scored after the choice is on disk, and read once. In both halves a witness of fixed direction is asked besides, which
says whether members and held-out images are the right way round (`evidence.direction`). The first process
writes all files but shards and ledgers.

run.json holds the digest of halves.npz, calibration.json those of all that it was made from (see `digests`).
"""

import itertools
import os
import pathlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dime_jax import data, evidence, scoring
from dime_jax._util import digests, files, records, validate
from dime_jax._util.distributed import on_first_process
from dime_jax._util.records import Absent
from dime_jax.attacks import Setting, attack_names, describe_attack, get_attack
from dime_jax.attacks.loss_level import BESIDE_NAME, NAME, setting_for
from dime_jax.core.denoiser import Denoiser
from dime_jax.core.schedule import NoiseSchedule
from dime_jax.data import Halves, Pair, Split
from dime_jax.data.groups import ALONE
from dime_jax.evidence import Judgement, Way
from dime_jax.evidence.metrics import Groups
from dime_jax.guards import identity, model_check
from dime_jax.protocol import beside, calibration, statistics
from dime_jax.protocol.beside import Guarded
from dime_jax.protocol.calibration import Calibration, Outcome, TermPair, calibrate, evaluate
from dime_jax.protocol.evaluation import SCHEMA_VERSION, AdjustedRow, AtThreshold, Evaluation, ResultRow, check_version
from dime_jax.protocol.statistics import Statistics
from dime_jax.scoring import score_table
from dime_jax.scoring.planning import Job, witness_jobs
from dime_jax.scoring.query_ledger import REFERENCE
from dime_jax.scoring.score_table import ScoreTable

HALVES = Halves._fields
MANIFESTS = {half: f"{half}/manifest.json" for half in HALVES}
STAGES = ("calibration", "calibrate", "test", "evaluate")
# The frozen attacks in calibration.json, by what is taken out of their scores.
_KEYS = {way: "calibrations" if way is Way.PLAIN else way.value for way in Way}
# What calibration.json is made from, and goes with.
CALIBRATION_FILES = ("run.json", "halves.npz", MANIFESTS["calibration"])


class _Run(NamedTuple):
    """run.json: attacks by name with their settings, and the fingerprint of the reference."""

    seed: int
    jobs: list[tuple[str, Setting]]
    witness: list[tuple[str, Setting]]
    reference: Absent[str] = None


def run(
    directory: str | os.PathLike[str],
    denoiser: Denoiser,
    source: data.Source,
    halves: Halves,
    jobs: Sequence[Job],
    *,
    reference: Denoiser | None = None,
    heldout: np.ndarray | None = None,
    candidates: np.ndarray | None = None,
    groups: np.ndarray | None = None,
    seed: int = 0,
    transform: data.Transform | None = None,
    options: scoring.ScoringOptions | None = None,
    take: Sequence[str] = STAGES,
    say: Callable[[str], object] = lambda text: None,
    hooks: scoring.Hooks = scoring.NO_HOOKS,
) -> Guarded:
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
      reference: a second model, that is asked the same.
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
      The model as everything else in the run is asked of it.
    """
    directory = begin(directory, jobs, halves, seed, groups=groups, reference=reference)
    together = halves.together()
    known = together.heldout if heldout is None else heldout
    model = guard(
        directory,
        denoiser,
        source,
        known,
        reference=reference,
        transform=transform,
        seed=seed,
        options=options,
        say=say,
        hooks=hooks,
    )
    asked = np.concatenate([*together.sides, known, *([] if candidates is None else [candidates])])
    statistics.make(directory, source, asked, transform or data.transform_for(source, denoiser.image_shape))
    for stage in take:
        if stage == "calibrate":
            calibrate_run(directory)
        elif stage == "evaluate":
            evaluate_run(directory)
        else:
            score_half(directory, stage, model, source, transform=transform, options=options)
    return model


def guard(
    directory: str | os.PathLike[str],
    denoiser: Denoiser,
    source: data.Source,
    heldout: np.ndarray,
    *,
    reference: Denoiser | None = None,
    transform: data.Transform | None = None,
    seed: int = 0,
    options: scoring.ScoringOptions | None = None,
    say: Callable[[str], object] = lambda text: None,
    hooks: scoring.Hooks = scoring.NO_HOOKS,
) -> Guarded:
    """Check that the model is a denoiser, and that it is the one that the run was begun with; the reference, too.

    Arguments and what is returned as for `run`.

    Raises:
      ValueError: for another model than that; and for a reference that is none (`beside.check`) or no denoiser.
    """
    directory, options = pathlib.Path(directory), options or scoring.ScoringOptions()
    if reference is not None:
        beside.check(denoiser, reference, source, heldout, transform, seed)
    check = model_check.check_once(
        directory, denoiser, source, heldout, transform=transform, seed=seed, options=options
    )
    if not check.passed:
        say(f"warning: {check.summary}")
    hooks = identity.guard(directory, denoiser, options, hooks)
    if reference is None:
        return Guarded(denoiser, hooks)
    denoiser.release()
    own = directory / REFERENCE
    there = model_check.check_once(own, reference, source, heldout, transform=transform, seed=seed, options=options)
    reference.release()
    beside.check_answers(check, there, reference.name)
    return Guarded(denoiser, hooks, Guarded(reference, identity.guard(own, reference, options)))


def begin(
    directory: str | os.PathLike[str],
    jobs: Sequence[Job],
    halves: Halves,
    seed: int = 0,
    *,
    groups: np.ndarray | None = None,
    reference: Denoiser | None = None,
) -> pathlib.Path:
    """Write down what will be run; a directory that holds another run is refused.

    Args:
      directory: of the run.
      jobs: every attack and setting to choose from.
      halves: who chooses, and who is tested.
      seed: of all draws.
      groups: of all images of the source [n], -1 for one on its own: images that belong together, which intervals allow
        for. None for a run that has its groups already, or has none.
      reference: a second model, that is asked the same.

    Raises:
      ValueError: for another run, or an empty side.
    """
    directory = pathlib.Path(directory)
    columns, beside_it = _columns(halves, groups), None if reference is None else reference.fingerprint
    run = _Run(seed, _named(jobs), _named(witness_jobs(jobs)), beside_it)
    for name, column in columns.items():
        validate.check_not_empty(column, name)

    def write() -> None:
        if is_begun(directory):
            if _read_run(directory) != run:
                raise ValueError(f"{directory} holds a run with another seed, reference, other attacks or settings")
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
    model: Guarded,
    source: data.Source,
    *,
    transform: data.Transform | None = None,
    options: scoring.ScoringOptions | None = None,
) -> ScoreTable:
    """Score one half: "calibration" over the whole grid, "test" at the settings that calibration froze.

    A budget in `options` is that of the whole run: of the check of the model, both halves and all other tables in it.
    """
    directory = pathlib.Path(directory)
    validate.check_choice(half, HALVES, "half")
    run, split = _read_run(directory), getattr(read_halves(directory), half)
    _check_reference(directory, None if model.reference is None else model.reference.denoiser.fingerprint)
    if half == "test":
        jobs = [frozen_job(frozen) for way in Way for frozen in read_calibrations(directory, way)]
        calibrated = score_table.read_manifest(directory / "calibration")["identity"]["model"]
        if model.denoiser.fingerprint != calibrated:
            raise ValueError(f"{directory} was calibrated on model {calibrated}, this is {model.denoiser.fingerprint}")
    else:
        jobs = _jobs(run.jobs)
    return beside.score(
        model,
        directory,
        half,
        source,
        jobs + _jobs(run.witness),
        indices=shuffled(np.concatenate([split.member, split.heldout]), run.seed),
        transform=transform,
        seed=run.seed,
        options=options or scoring.ScoringOptions(),
    )


def _check_reference(directory: pathlib.Path, given: str | None) -> None:
    """Require the reference that a run was begun with, by its fingerprint; None for none."""
    begun = _read_run(directory).reference
    if given != begun:
        asked = [f"the reference {one}" if one else "no reference" for one in (begun, given)]
        raise ValueError(f"{directory} was begun with {asked[0]}, this is {asked[1]}")


def _read_half(directory: pathlib.Path, half: str) -> ScoreTable:
    """The table of a half, with that of the run's reference beside it."""
    table = beside.read(directory, half)
    _check_reference(directory, None if table.reference is None else table.reference.manifest["identity"]["model"])
    return table


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
        asked, run = asked_labels(directory), _read_run(directory)
        jobs = [*read_jobs(directory), *(job for job in _jobs(run.witness) if job.label not in asked)]
        pictures = statistics.read(directory) if statistics.exist(directory) else None
        contents: dict[str, records.Json] = {"schema_version": SCHEMA_VERSION}
        for way in ways(pictures is not None, run.reference is not None):
            contents[_KEYS[way]] = records.plain(_calibrate_each(directory, jobs, _row_of, pictures, way))
        made_from = list(CALIBRATION_FILES)
        made_from += [] if pictures is None else [statistics.FILE]
        made_from += [] if run.reference is None else [f"{REFERENCE}/{MANIFESTS['calibration']}"]
        digests.write(directory / "calibration.json", contents, made_from)

    on_first_process(write)
    return read_calibrations(directory)


def ways(pictures: bool, reference: bool) -> list[Way]:
    """What can be taken out of scores in a run that has statistics of its pictures, or a reference."""
    return [way for way in Way if way.picture <= pictures and way.reference <= reference]


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
    both, so that the same AUC is judged the same. It is not heard beside a reference that knows the held-out images
    (`reference_direction`): minus what that one explains, those who were never seen look like members.

    Args:
      directory: of the run.
      halves: names of some halves.
      groups: of all images of the source [n], which bounds allow for; those that are stored in the run if None.
    """
    directory = pathlib.Path(directory)
    # Plain, minus what the picture explains, and minus what the reference does: not minus both, for fewer looks.
    looked = ways(statistics.exist(directory), _read_run(directory).reference is not None)
    looked = [way for way in looked if way is not Way.BESIDE_ADJUSTED]
    partial = reference_direction(directory, halves, groups)
    heard = looked if partial is None or partial.judgement is not Judgement.BELOW else looked[:-1]
    return _hear(directory, halves, groups, heard, len(looked))


def reference_direction(
    directory: str | os.PathLike[str], halves: Sequence[str] = HALVES, groups: np.ndarray | None = None
) -> evidence.Direction | None:
    """What the reference's answers to the witness's questions say by themselves; None without a reference.

    One that was trained on neither members nor held-out images, or on both alike, tells them apart no more than the
    pictures do. `BELOW`: it knows the held-out images better. `ABOVE`: it knows the members better.
    """
    directory = pathlib.Path(directory)
    if _read_run(directory).reference is None:
        return None
    looked = ways(statistics.exist(directory), reference=False)
    return _hear(directory, halves, groups, looked, len(looked), by_reference=True)


def _hear(
    directory: pathlib.Path,
    halves: Sequence[str],
    groups: np.ndarray | None,
    heard: Sequence[Way],
    looks: int,
    by_reference: bool = False,
) -> evidence.Direction:
    """Hear the witness in some ways, of so many, in the model's answers or in the reference's."""
    groups = read_groups(directory) if groups is None else groups
    witness, splits = _jobs(_read_run(directory).witness), read_halves(directory)
    pictures = statistics.read(directory) if statistics.exist(directory) else None
    scores = []
    for half in halves:
        table, split = _read_half(directory, half), getattr(splits, half)
        for asked, way in itertools.product(witness, heard):
            whose, job = beside.of_reference(table, asked) if by_reference else (table, asked)
            terms = term_pair(whose, job, split, way)
            if way is Way.PLAIN:
                left = terms.map(lambda side: side[0])
            elif terms.member.size and terms.heldout.size:
                known = statistics_pair(whose, job, split, pictures, way)
                left = _residuals(calibration.fixed_rule(job.attack, whose.schedule, job.setting), terms, known, way)
            else:
                continue
            t, grouped = int(asked.setting["t"]), _groups(whose, job, split, groups, way)
            scores.append(evidence.WitnessScores(half, t, *left, grouped, way))
    return evidence.judge_direction(scores, looks=looks * len(witness) * len(HALVES))


def _residuals(witness: Calibration, terms: TermPair, pictures: Pair[np.ndarray] | None, way: Way) -> Pair[np.ndarray]:
    """What is left of the witness's scores, from one fit over members and held-out images alike."""
    known = None if pictures is None else np.concatenate(pictures)
    left = calibration.to_adjust(witness, way).pile(np.concatenate(terms, axis=1), known).residuals()
    return Pair(left[: terms.member.shape[1]], left[terms.member.shape[1] :])


def _calibrate_each(
    directory: pathlib.Path,
    jobs: Sequence[Job],
    key: Callable[[Job], Hashable],
    pictures: Statistics | None = None,
    way: Way = Way.PLAIN,
) -> list[Calibration]:
    """One calibration for each group of jobs with the same key, in the order of the grid."""
    table = _read_half(directory, "calibration")
    split, schedule = read_halves(directory).calibration, table.schedule
    rows: dict[Hashable, list[Job]] = {}
    for job in jobs:
        rows.setdefault(key(job), []).append(job)
    frozen = []
    for row in rows.values():
        settings, terms = [job.setting for job in row], [term_pair(table, job, split, way) for job in row]
        known = [statistics_pair(table, job, split, pictures, way) for job in row]
        frozen.append(calibrate(row[0].attack, schedule, settings, terms, known, way))
    return frozen


def read_calibrations(directory: str | os.PathLike[str], way: Way = Way.PLAIN) -> list[Calibration]:
    """The frozen attacks of calibration.json with something taken out of their scores; none in a run without that."""
    path = pathlib.Path(directory) / "calibration.json"
    contents = _read_sealed(path).check().contents
    check_version(path, contents)
    return records.parse(list[Calibration], contents.get(_KEYS[way], []), f"{path}: {_KEYS[way]}")


def fixed_rule(schedule: NoiseSchedule, setting: Setting | None = None, reference: bool = False) -> Calibration:
    """The rule for audits without known members, at the setting that the schedule calls for.

    Args:
      schedule: the model's.
      setting: if it is known.
      reference: whether there is one: then it is another rule.
    """
    setting = setting_for(schedule) if setting is None else setting
    return calibration.fixed_rule(get_attack(BESIDE_NAME if reference else NAME), schedule, setting)


def evaluate_run(directory: str | os.PathLike[str]) -> Evaluation:
    """The frozen attacks on the test half's table; writes results.json and returns what it holds."""
    results = evaluation(directory)
    on_first_process(lambda: files.write_json(pathlib.Path(directory) / "results.json", records.plain(results)))
    return results


def evaluation(directory: str | os.PathLike[str], groups: np.ndarray | None = None) -> Evaluation:
    """What `evaluate_run` writes; intervals allow for the groups of all images [n], by default those of the run."""
    directory = pathlib.Path(directory)
    table, seed = _read_half(directory, "test"), _read_run(directory).seed
    groups = read_groups(directory) if groups is None else groups
    split = read_halves(directory).test
    pictures = statistics.read(directory) if statistics.exist(directory) else None

    def outcome_of(frozen: Calibration) -> Outcome:
        return outcome(table, frozen, split, seed, groups, pictures)

    frozen = {way: read_calibrations(directory, way) for way in Way}
    others = {way: {one.label: outcome_of(one) for one in frozen[way]} for way in list(Way)[1:]}
    rows = []
    for one in frozen[Way.PLAIN]:
        seconds = one.queries * table.seconds_per_query
        rows.append(result_row(outcome_of(one), seconds, {way: of.get(one.label) for way, of in others.items()}))
    calibration_half = _read_half(directory, "calibration")
    about, fingerprints = table.manifest["identity"], {}
    if table.reference is not None:
        fingerprints["reference"] = table.reference.manifest["identity"]["model"]
    check = model_check.read_check(directory, about["model"])
    return Evaluation(
        results=tuple(rows),
        fingerprints={
            "model": about["model"],
            **fingerprints,
            "calibration_data": calibration_half.manifest["identity"]["data"],
            "test_data": about["data"],
        },
        precision=about["precision"],
        seed=seed,
        queries_made=calibration_half.queries_made + table.queries_made + (check.queries if check else 0),
        reference_queries_made=beside.queries_made(directory, [calibration_half, table]),
        model_check=check,
        direction=read_direction(directory, groups=groups),
        reference_direction=reference_direction(directory, groups=groups),
        warnings=tuple(_warnings(table, frozen, split)),
    )


def _warnings(table: ScoreTable, frozen: Mapping[Way, Sequence[Calibration]], split: Split) -> Iterator[str]:
    """What to know about the answers in the test half's table."""
    before = 0
    for way, whose in ((Way.PLAIN, ""), (Way.BESIDE, " beside the reference")):
        used = [sum(side.shape[1] for side in term_pair(table, frozen_job(one), split, way)) for one in frozen[way]]
        lost = len(table.index) - min(used, default=len(table.index))
        if lost > before:
            yield f"{lost} of {len(table.index)} test images were left out{whose}: unreadable or no finite answer"
        before = lost
    yield from beside.noise_warnings(table, [frozen_job(one) for one in frozen[Way.BESIDE]])


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
    known = statistics_pair(table, job, split, pictures, frozen.way)
    grouped = _groups(table, job, split, groups, frozen.way)
    return evaluate(frozen, term_pair(table, job, split, frozen.way), seed=seed, groups=grouped, statistics=known)


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
    return frozen.score(terms_of(table, frozen, indices), statistics.of_images(pictures, indices))


def terms_of(table: ScoreTable, frozen: Calibration, indices: np.ndarray) -> np.ndarray:
    """Terms of some images of a table as `Calibration.score` takes them; all NaN without a finite answer."""
    terms = beside.terms(table, frozen_job(frozen), frozen.way.reference)
    place = {int(index): row for row, index in enumerate(table.index)}
    terms = terms[:, [place[int(index)] for index in indices]]
    return np.where(np.all(np.isfinite(terms), axis=0), terms, np.nan)


def result_row(outcome: Outcome, seconds: float, others: Mapping[Way, Outcome | None]) -> ResultRow:
    """One row of the results; `others` are the same attack with something taken out of its score."""
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
        **{way.value: _adjusted_row(other) for way, other in others.items() if other is not None},
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


def term_pair(table: ScoreTable, job: Job, split: Split, way: Way = Way.PLAIN) -> TermPair:
    """Terms of the images with a finite answer, members and held-out images apart, as `Calibration.score` takes them.

    Args:
      table: with the attack's terms.
      job: the attack.
      split: members and held-out images.
      way: what will be taken out of the score.
    """
    terms = beside.terms(table, job, way.reference)
    return _usable(table, job, split, way).map(lambda usable: terms[:, usable])


def statistics_pair(
    table: ScoreTable, job: Job, split: Split, pictures: Statistics | None, way: Way
) -> Pair[np.ndarray] | None:
    """The statistics [n, k] of the images of `term_pair`; None if what pictures explain is not taken out."""
    if pictures is None or not way.picture:
        return None
    return _usable(table, job, split, way).map(lambda usable: pictures.of(table.index[usable]))


def _groups(table: ScoreTable, job: Job, split: Split, groups: np.ndarray | None, way: Way) -> Groups:
    """The groups of the images of `term_pair`, from those of all images."""
    if groups is None:
        return None, None
    return _usable(table, job, split, way).map(lambda usable: groups[table.index[usable]])


def _usable(table: ScoreTable, job: Job, split: Split, way: Way) -> Pair[np.ndarray]:
    """Which rows of the table are members, and which held-out images, with a finite answer."""
    finite = np.all(np.isfinite(beside.terms(table, job, way.reference)), axis=0)
    return split.sides.map(lambda side: finite & np.isin(table.index, side))


def _read_sealed(path: pathlib.Path) -> digests.Sealed:
    """A JSON file of the run; if it was never written, the error says which stage comes first."""
    try:
        return digests.read(path)
    except FileNotFoundError:
        before = {"run.json": "start a run", "calibration.json": "calibrate"}[path.name]
        raise ValueError(f"no {path}: {before} first") from None
