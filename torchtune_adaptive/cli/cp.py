"""``tune-adaptive cp``: copy one of our configs or recipes, which ``tune cp`` does not know."""

from pathlib import Path

from torchtune_adaptive.cli.arguments import Commands, add_command
from torchtune_adaptive.files import check_writable, write_atomically, writing
from torchtune_adaptive.stock.installed import config_files, recipe_files


def add_cp(commands: Commands) -> None:
    """Add the command."""
    command = add_command(
        commands,
        "cp",
        "copy one of our configs or recipes",
        "cp tiny/full my_config.yaml",
        "cp adaptive_full_finetune_distributed my_recipe.py",
    )
    files = config_files() | recipe_files()
    command.add_argument("name", metavar="NAME", choices=files, help="one of: %(choices)s")
    command.add_argument("destination", metavar="DESTINATION", type=Path, help="file or folder to write to")
    command.set_defaults(run=lambda arguments: _copy(files[arguments.name], arguments.destination))


def _copy(source: Path, destination: Path) -> None:
    path = destination / source.name if destination.is_dir() else destination
    with writing("DESTINATION", path):
        check_writable(path)
        write_atomically(path, source.read_bytes(), makes_folder=False)
    print(f"Copied to {path}")
