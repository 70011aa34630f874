"""What ``python -m npattn`` runs; imported only when a command is called."""
