"""Where the agents of a job meet: one protocol, three implementations (elaunch.store.protocol)."""
