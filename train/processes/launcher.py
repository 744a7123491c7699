"""`accelerate launch`, without its traceback and with the exit code of the process that failed first."""

import logging

from accelerate.commands import launch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main() -> None:
    """Run `accelerate launch` with this command line; each launched process reports its own errors."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        launch.main()
    except ChildFailedError as error:
        raise SystemExit(error.get_first_failure()[1].exitcode) from None


if __name__ == "__main__":
    main()
