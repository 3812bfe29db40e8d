"""``python -m dspine_export`` is the ``dspine-export`` command."""

from dspine_export.cli.main import main

if __name__ == "__main__":
    main()
