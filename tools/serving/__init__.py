"""Load on a running server: clients, figures, the server's memory."""
