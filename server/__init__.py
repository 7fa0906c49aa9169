"""What runs on the server: intake, merging, evaluation. It may read every byte that it receives."""
