"""Executes a notebook and writes it with what it printed and drew: `python docs/run_notebook.py FROM TO`."""

import pathlib
import sys

import nbclient
import nbformat


def main(source: str, target: str) -> None:
    """Run every cell; an error in one of them is an error here."""
    notebook = nbformat.read(source, as_version=4)
    nbclient.NotebookClient(notebook, timeout=1800, kernel_name="python3").execute()
    pathlib.Path(target).parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, target)


if __name__ == "__main__":
    main(*sys.argv[1:])
