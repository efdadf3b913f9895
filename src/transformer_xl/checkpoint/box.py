"""The model in the box: the one that comes with the package, where it lies, and the word for it wherever a run is named."""

from pathlib import Path

from transformer_xl.errors import CheckpointError

BOX = "box"


def box_folder() -> Path:
    """A checkpoint's own folder, like any other; a checkout has none before `recipes/box.py` has packed one."""
    return Path(__file__).parents[1] / BOX


def box_is_here() -> bool:
    return (box_folder() / "config.json").is_file()


def folder_of(run: Path | str | None) -> Path:
    """Of a run by its name. None is the model in the box; so is the word for it, unless something here has that name."""
    if run is not None and (str(run) != BOX or Path(BOX).exists()):
        return Path(run)
    if not box_is_here():
        raise CheckpointError("there is no model in the box of this build; name a run's folder, such as runs/first")
    return box_folder()
