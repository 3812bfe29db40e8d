"""The ``dspine-export`` command: options in, text or JSON out. No logic lives here."""
