"""Train a model: python train.py --config configs/default.yaml [--key value ...]"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # python -P and PYTHONSAFEPATH leave it out

from common import distributed
from common.build import build_run
from common.config.registry import import_path
from common.failure.program import exit_process, report_errors
from common.monitor.log import setup_log
from common.run_context import managed_run
from common.trainer import Trainer
from cli.command_line import parse
from cli.program import entered, with_config_of_run
from cli.summary import log_end, log_start
from custom.config import Config


def main(argv: list[str]) -> int:
    """Load the config, enter the run, build, restore, train. Returns the exit code."""
    setup_log()
    resolved = parse(Config, with_config_of_run(argv))
    config, command = resolved.config, [__file__, *argv]
    code = distributed.spawn(config.gpu_ids, config.dist, command)
    if code is not None:  # this process only started the ones that train
        return code
    with managed_run(config, resolved, command) as run, entered("explain"):
        built = build_run(config, run.rank, first_weights=run.needs_first_weights)
        plugins = [import_path(name) for name in config.plugins]
        run.open()  # after building: an error there leaves an earlier run of this name in place
        trainer = Trainer(config, built, run)
        for plugin in plugins:
            plugin(trainer)
        trainer.restore()
        log_start(trainer)
        with entered("around", run, trainer):
            try:
                outcome = trainer.train()
            except KeyboardInterrupt:
                log_end(trainer, None)
                raise
            run.end(outcome)
        log_end(trainer, outcome)
    return outcome.exit_code


if __name__ == "__main__":
    with report_errors():
        exit_process(main(sys.argv[1:]))
