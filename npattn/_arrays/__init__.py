"""What every room shares: array libraries, checks with their wording, broadcasting, trees of parameters, threads."""
