"""The server: the one process between an agent and its workers; it forks, waits and sweeps.

Agent and server are joined by a Unix socket pair (elaunch.wire.local). A message has ``op``:

==========  ==================  ==================================================================
from        op                  fields
==========  ==================  ==================================================================
agent       configure           run_id, start ("fork" | "exec"), preload, later, later_delay (s),
                                import_path, open_files (soft and hard limit of the workers),
                                timer_file (the pipe of elaunch.server.timers, or null), temp (the
                                run's own directory for temporary files, or null), numa_binding
                                (a mode of elaunch.server.numa, or null), nproc (0: as many as
                                there are devices), interpreter, environ (all variables, for a
                                server that was started without some of them; or null)
agent       start               round, rank, local_rank, mode, entrypoint, args, interpreter, env;
                                files: its stdout and stderr
agent       store               round (-1: before the first), host, fixed (whether all rounds have
                                this port), identity (what other agents may read in it, or "");
                                file: the listening socket of the store
agent       signal              signum, group (also the workers' process groups), once (not where
                                its sender has signalled all processes), stops (whether the
                                workers are meant to end by it), shielded (local ranks in which
                                SIGTERM does nothing, and which get SIGKILL in its place)
agent       sweep               round, signum (0: none), grace (s), deadline (s), keeps (null: ends
                                all workers; else the local ranks of those that stay, with all that
                                they have started)
agent       fence               until: kill all workers when it has passed, unless a later comes
agent       count_devices       kind, interpreter
server      ready               problem (text or null), unforkable (why it must not be forked any
                                more, or "")
server      warmed              problem (text or null), seconds, settings (variables that the script
                                sets, so that the later modules are left to the workers), compiles
                                (whether what compiling takes is imported)
server      started             round, local_rank, pid, at
server      not_started         round, local_rank, problem
server      exited              the fields of elaunch.endings.Exit
server      swept               round, killed (pids and names), survivors (and users, or null), kept
                                (the local ranks of those that stay)
server      store_failed        round, problem
server      fenced              late (s): the fence has passed so long ago; all workers are killed
server      devices             count (int or null), problem
==========  ==================  ==================================================================

``at`` is ``time.monotonic()``, which all processes of one machine share. The socket is also the
lifeline: when the agent's end closes, the server kills everything below it and ends.
"""
