"""What a run shows where there is no terminal."""

from dime_jax.progress import Progress


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_plain_lines_now_and_then(capsys):
    clock = Clock()
    with Progress(1000, clock=clock) as progress:
        for second in range(1, 11):
            clock.now = 2.0 * second
            progress.advance(100, f"step {second}")
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["500 of 1,000 queries, 50/s, 10 s left, step 5", "1,000 of 1,000 queries, 50/s, 0 s left, step 10"]


def test_the_estimate_leaves_out_compilation(capsys):
    clock = Clock()
    with Progress(100_000, clock=clock) as progress:
        clock.now = 9.0
        progress.advance(100, "compiling")
        progress.compiled()
        clock.now = 10.0
        progress.advance(900, "running")
    assert capsys.readouterr().err.splitlines()[0] == "measured 900 queries/s: about 2 min to go"


def test_silent_processes_say_nothing(capsys):
    with Progress(10, silent=True) as progress:
        progress.say("hello")
        progress.advance(10, "all")
    assert capsys.readouterr().err == ""
