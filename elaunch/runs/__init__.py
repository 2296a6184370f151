"""A run on disk: its directory, its record, and where both are.

``directory`` finds, makes and prunes run directories; ``record`` is the record that
``elaunch status`` shows, ``identity`` which processes it means; ``logtree`` names the workers' log
files; ``statedir`` writes files so that readers never see half of one; ``verdict`` says where a
run's time went, ``pace`` how fast it trains, ``usage`` what processes take of the machine;
``job`` is the one document of a job, ``prometheus`` the page that is scraped.
"""

__all__ = [
    "directory",
    "identity",
    "job",
    "logtree",
    "pace",
    "prometheus",
    "record",
    "statedir",
    "usage",
    "verdict",
]
