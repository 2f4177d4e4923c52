"""Multi-process jobs: processes start and end together, and agree on their inputs."""
