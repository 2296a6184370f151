"""Where the agents of a job meet: one protocol, two implementations (elaunch.store.protocol)."""
