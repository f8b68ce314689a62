"""Refuses `pip install .`, which would leave configs, data and sources of operators behind."""

from setuptools import setup
from setuptools.command.build_py import build_py


class EditableOnly(build_py):
    """Builds nothing but what `pip install -e .` needs: a reference to this folder."""

    def run(self) -> None:
        """Raise `SystemExit` unless the installation is editable."""
        if not self.editable_mode:
            raise SystemExit(
                "error: this project runs from its own folder, with its configs and data; "
                "to import it from elsewhere: python -m pip install -e ."
            )
        super().run()


setup(cmdclass={"build_py": EditableOnly})
