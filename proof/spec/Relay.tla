------------------------------- MODULE Relay -------------------------------
(* How the relays of the Temporal adapter look after the permit of one ticket *)
(* for the runs of workflows: adapters/redlease_temporal/_backends/redis. Two  *)
(* runs of one workflow (the second continues the first, or is its reset), a  *)
(* run of another workflow that adopts the permit, and relays that stand      *)
(* still, die, and take over from each other. What Redis does with a permit   *)
(* is in Lock.tla. `Off` names rules that are turned off, as there.           *)
(*                                                                            *)
(* A relay that stands still is one that takes no step while time passes.     *)
(* Fences are names here: one that nobody refers to any more is given again,  *)
(* so that nothing grows without a bound. That they grow is in Lock.tla.      *)
(*                                                                            *)
(* Left out: other holders and waiters, weights and downgrades, admission,    *)
(* `on_close="lease"` and `max_hold`, canaries, and resets of closed runs:    *)
(* their permit may have been released before the reset.                      *)
EXTENDS Integers, FiniteSets, TLC

CONSTANTS
    Relays,
    Lease, Window, Grace, \* ticks: of permits; how long to adopt; how long without word of a run
    Doubles, Releases, Successions, Handovers, Ends, Crashes, Stalls, Losses, Wipes, Outages, \* how many of each
    Off

VARIABLES
    permit, tomb,       \* the resource in Redis: its permit, and requests that are withdrawn
    rec, heard,         \* the registry in Redis: a record for each workflow, and the relays whose lease has not ended
    tr,                 \* trackers[r][w]: what a relay knows of a record that it looks after
    alive, up,          \* the relays that live; whether the Temporal server answers
    st, asks, knows, marked, told, left, data, \* the runs; left: the release that its task has asked for, and those recorded
    late,               \* executions of `redlease.enqueue` that have not reached Redis yet, and may do so at any time
    budget

vars == <<permit, tomb, rec, heard, tr, alive, up, st, asks, knows, marked, told, left, data, late, budget>>
runs == <<st, asks, knows, marked, told, left, data>>

On(rule) == rule \notin Off
Less(t) == IF t > 0 THEN t - 1 ELSE t
Workflows == {"A", "B"}
Runs == {"A1", "A2", "B1"}
Of(run) == IF run = "B1" THEN "B" ELSE "A"
Free == [f |-> 0, by |-> {}, left |-> 0] \* by: the requests that share it
NoRecord == [owner |-> "", run |-> "", salt |-> 0, f |-> 0, ok |-> FALSE, rel |-> 0] \* rel: noted to be released
\* once: a local activity waits for the outcome; answered: it has it; end: its run has closed; win: what is left of the
\* time to adopt, -1 while the run goes on; dumb: for how long the Temporal server has not answered.
NoTracker == [on |-> FALSE, run |-> "", salt |-> 0, f |-> 0, ok |-> FALSE, once |-> FALSE, answered |-> FALSE,
              end |-> FALSE, win |-> -1, dumb |-> 0, rel |-> 0]
Tracker(run, salt, f, ok, once) ==
    [NoTracker EXCEPT !.on = TRUE, !.run = run, !.salt = salt, !.f = f, !.ok = ok, !.once = once]
FromRecord(known) == [Tracker(known.run, known.salt, known.f, known.ok, FALSE) EXCEPT
                         !.rel = IF On("a release is in the record") THEN known.rel ELSE 0]
Record(r, t) == [owner |-> r, run |-> t.run, salt |-> t.salt, f |-> t.f, ok |-> t.ok, rel |-> t.rel]
Held(f) == f > 0 /\ permit.f = f /\ permit.left > 0
Spend(what) == budget[what] > 0 /\ budget' = [budget EXCEPT ![what] = @ - 1]

InUse == {permit.f} \cup {rec[w].f : w \in Workflows} \cup {tr[r][w].f : r \in Relays, w \in Workflows}
         \cup {rec[w].rel : w \in Workflows} \cup {tr[r][w].rel : r \in Relays, w \in Workflows}
         \cup {left[run].asked : run \in Runs} \cup UNION {left[run].done : run \in Runs}
         \cup {knows[run] : run \in Runs} \cup {data} \cup UNION {marked[run] : run \in Runs}
Fresh == CHOOSE f \in 1..8 : f \notin InUse /\ \A g \in 1..(f - 1) : g \in InUse

-----------------------------------------------------------------------------
(* Workflow runs, whose code runs on some worker, beside its relay.           *)

(* A workflow task executes the local activity `redlease.enqueue`; again if it was not recorded. *)
Ask(run, r) ==
    /\ st[run] = "open" /\ r \in alive /\ run # "B1" /\ <<run, r>> \notin late
    /\ asks[run] = "no" \/ (asks[run] = "asking" /\ late = {} /\ \A other \in Relays : ~tr[other]["A"].once)
    /\ asks' = [asks EXCEPT ![run] = "asking"] /\ late' = late \cup {<<run, r>>}
    /\ UNCHANGED <<permit, tomb, rec, heard, tr, alive, up, st, knows, marked, told, left, data, budget>>

(* The task that asked is executed again, on another worker, while the first execution is still under way. *)
AskTwice(run, r) ==
    /\ st[run] = "open" /\ asks[run] = "asking" /\ r \in alive /\ <<run, r>> \notin late /\ Spend("double")
    /\ late' = late \cup {<<run, r>>}
    /\ UNCHANGED <<permit, tomb, rec, heard, tr, alive, up, runs>>

(* The task is recorded: its history has the grant. Without that (a task that failed) nobody knows of it. *)
Mark(run, r) ==
    LET t == tr[r]["A"] IN
    /\ st[run] = "open" /\ asks[run] = "asking" /\ r \in alive
    /\ t.on /\ t.run = run /\ t.once /\ t.f > 0 /\ ~t.answered
    /\ asks' = [asks EXCEPT ![run] = "done"] /\ knows' = [knows EXCEPT ![run] = t.f]
    /\ marked' = [marked EXCEPT ![run] = {t.f}]
    /\ tr' = [tr EXCEPT ![r]["A"].answered = TRUE]
    /\ UNCHANGED <<permit, tomb, rec, heard, alive, up, st, told, left, data, late, budget>>

(* The local activity `redlease.release` notes the release in the record, which belongs to its relay from then on. *)
Noted(w, r, f) ==
    LET base == IF rec[w].owner = r /\ tr[r][w].on /\ tr[r][w].f = f THEN tr[r][w] ELSE FromRecord(rec[w])
        t == [base EXCEPT !.rel = f]
    IN
    /\ tr' = [tr EXCEPT ![r][w] = t] /\ rec' = [rec EXCEPT ![w] = Record(r, t)] /\ heard' = heard \cup {r}

(* A block ends. The run goes on to hold until that is recorded. *)
Release(run, r) ==
    LET f == knows[run] IN
    /\ st[run] = "open" /\ f > 0 /\ left[run].asked = 0 /\ r \in alive /\ Spend("release")
    /\ left' = [left EXCEPT ![run].asked = f]
    /\ IF rec[Of(run)].f = f THEN Noted(Of(run), r, f) ELSE UNCHANGED <<rec, tr, heard>>
    /\ UNCHANGED <<permit, tomb, alive, up, st, asks, knows, marked, told, data, late>>

(* The task is recorded. *)
RecordRelease(run) ==
    LET f == left[run].asked IN
    /\ st[run] = "open" /\ f > 0
    /\ left' = [left EXCEPT ![run] = [asked |-> 0, done |-> @.done \cup {f}]]
    /\ knows' = [knows EXCEPT ![run] = IF @ = f THEN 0 ELSE @]
    /\ UNCHANGED <<permit, tomb, rec, heard, tr, alive, up, st, asks, marked, told, data, late, budget>>

(* It is not: the task failed, or is executed again with events that came since, and holds on. *)
ExecuteAgain(run) ==
    /\ st[run] = "open" /\ left[run].asked > 0 /\ Spend("double")
    /\ left' = [left EXCEPT ![run].asked = 0]
    /\ UNCHANGED <<permit, tomb, rec, heard, tr, alive, up, st, asks, knows, marked, told, data, late>>

(* A task that asked and released is not recorded, and will be executed again. *)
ReleaseUnrecorded(run, r) ==
    LET t == tr[r]["A"] IN
    /\ st[run] = "open" /\ asks[run] = "asking" /\ r \in alive /\ t.on /\ t.once /\ t.run = run /\ t.f > 0 /\ Spend("release")
    /\ rec["A"].f = t.f /\ Noted("A", r, t.f)
    /\ UNCHANGED <<permit, tomb, alive, up, runs, late>>

(* A request is given up of which no relay has a record; and its task is not recorded, and executed again. *)
GiveUp(run) ==
    /\ st[run] = "open" /\ asks[run] = "asking" /\ rec["A"].run # run /\ Spend("release")
    /\ tomb' = tomb \cup {<<run, 0>>}
    /\ UNCHANGED <<permit, rec, heard, tr, alive, up, runs, late>>

(* It completes, fails, times out or is terminated, without a release. *)
End(run) ==
    /\ st[run] = "open" /\ Spend("end") /\ st' = [st EXCEPT ![run] = "closed"] /\ knows' = [knows EXCEPT ![run] = 0]
    /\ UNCHANGED <<permit, tomb, rec, heard, tr, alive, up, asks, marked, told, left, data, late>>

(* It detaches its permit and continues as new. *)
Continue ==
    /\ st["A1"] = "open" /\ knows["A1"] > 0 /\ Spend("succession")
    /\ st' = [st EXCEPT !["A1"] = "continued", !["A2"] = "open"]
    /\ data' = knows["A1"] /\ knows' = [knows EXCEPT !["A1"] = 0]
    /\ UNCHANGED <<permit, tomb, rec, heard, tr, alive, up, asks, marked, told, left, late>>

(* It is reset, to after the grant was recorded or to before it asked. *)
Reset ==
    /\ st["A1"] = "open" /\ Spend("succession")
    /\ st' = [st EXCEPT !["A1"] = "reset", !["A2"] = "open"]
    /\ \/ knows' = [knows EXCEPT !["A2"] = knows["A1"], !["A1"] = 0]
          /\ marked' = [marked EXCEPT !["A2"] = marked["A1"]]
          /\ asks' = [asks EXCEPT !["A2"] = IF asks["A1"] = "asking" THEN "no" ELSE asks["A1"]]
       \/ knows' = [knows EXCEPT !["A1"] = 0] /\ UNCHANGED <<asks, marked>>
    /\ UNCHANGED <<permit, tomb, rec, heard, tr, alive, up, told, left, data, late>>

(* It detaches its permit for another workflow, and completes. *)
HandOver ==
    /\ st["A1"] = "open" /\ knows["A1"] > 0 /\ Spend("handover")
    /\ st' = [st EXCEPT !["A1"] = "closed", !["B1"] = "open"]
    /\ data' = knows["A1"] /\ knows' = [knows EXCEPT !["A1"] = 0]
    /\ UNCHANGED <<permit, tomb, rec, heard, tr, alive, up, asks, marked, told, left, late>>

(* `pool.adopt(permit)`: with a new fence, unless the run continues the one that detached it. *)
Adopt(run, r) ==
    LET w == Of(run) IN
    LET f == IF w = "A" THEN data ELSE Fresh IN
    LET t == Tracker(run, 0, f, TRUE, FALSE) IN
    /\ st[run] = "open" /\ data > 0 /\ knows[run] = 0 /\ run # "A1" /\ r \in alive
    /\ data' = 0
    /\ IF Held(data)
       THEN /\ permit' = [f |-> f, by |-> {<<run, 0>>} \cup IF w = "A" THEN permit.by ELSE {}, left |-> Lease]
            /\ knows' = [knows EXCEPT ![run] = f] /\ marked' = [marked EXCEPT ![run] = {f}]
            /\ tr' = [tr EXCEPT ![r][w] = t] /\ rec' = [rec EXCEPT ![w] = Record(r, t)]
            /\ heard' = heard \cup {r}
       ELSE UNCHANGED <<permit, knows, marked, tr, rec, heard>>
    /\ UNCHANGED <<tomb, alive, up, st, asks, told, left, late, budget>>

-----------------------------------------------------------------------------
(* The relays: relay.py, registry.py, requests.py and tracker.py.             *)

Known(r, w) == r \in alive /\ tr[r][w].on
Owns(r, w) == rec[w].owner = r
Forget(r, w) == tr' = [tr EXCEPT ![r][w] = NoTracker]

(* Requests.enqueue: `claim`, whose reply may be lost; then a tracker. A run's record of another request is replaced. *)
Enqueue(run, r) ==
    LET known == rec["A"]
        same == known.run = run /\ known.owner # ""
        new == Tracker(run, IF same THEN known.salt ELSE 0, IF same THEN known.f ELSE 0, FALSE, TRUE)
        t == [new EXCEPT !.rel = IF same /\ On("late copies keep the release") THEN known.rel ELSE 0]
    IN
    /\ <<run, r>> \in late /\ late' = late \ {<<run, r>>}
    /\ IF r \in alive
       THEN /\ rec' = [rec EXCEPT !["A"] = IF same THEN [known EXCEPT !.owner = r] ELSE Record(r, t)]
            /\ heard' = heard \cup {r}
            /\ \/ tr' = [tr EXCEPT ![r]["A"] = t] /\ UNCHANGED budget
               \/ UNCHANGED tr /\ Spend("lose")
       ELSE UNCHANGED <<rec, heard, tr, budget>>
    /\ UNCHANGED <<permit, tomb, alive, up, runs>>

(* acquire.lua: the permit of this ticket, if there is one, else a new one; and `_save`. A withdrawn request is made anew. *)
Acquire(r, w) ==
    LET t == tr[r][w]
        shared == permit.left > 0
        f == IF shared THEN permit.f ELSE Fresh
        withdrawn == <<t.run, t.salt>> \in tomb
        got == [t EXCEPT !.f = f]
    IN
    /\ Known(r, w) /\ t.f = 0 /\ ~t.end
    /\ IF withdrawn
       THEN /\ tr' = [tr EXCEPT ![r][w] = IF t.once /\ On("new request after a withdrawal") THEN [t EXCEPT !.salt = @ + 1] ELSE NoTracker]
            /\ rec' = IF Owns(r, w) THEN [rec EXCEPT ![w] = IF t.once /\ On("new request after a withdrawal") THEN [@ EXCEPT !.salt = t.salt + 1] ELSE NoRecord] ELSE rec
            /\ UNCHANGED permit
       ELSE /\ permit' = [f |-> f, by |-> {<<t.run, t.salt>>} \cup IF shared THEN permit.by ELSE {}, left |-> Lease]
            /\ IF Owns(r, w) THEN tr' = [tr EXCEPT ![r][w] = got] /\ rec' = [rec EXCEPT ![w] = Record(r, got)]
               ELSE Forget(r, w) /\ UNCHANGED rec
    /\ UNCHANGED <<tomb, heard, alive, up, runs, late, budget>>

(* _is_recorded: whether the history of its run has this grant. *)
IsRecorded(t) == IF On("this grant in the history") THEN t.f \in marked[t.run] ELSE marked[t.run] # {}

(* _deliver_grant: the permit is kept from when the history has it. Until then it is not renewed, and the wait of an attempt
   that has ended is no answer. *)
Deliver(r, w) ==
    LET t == tr[r][w] IN
    /\ Known(r, w) /\ up /\ t.f > 0 /\ ~t.ok /\ ~t.end /\ Held(t.f)
    /\ IF IsRecorded(t)
       THEN LET ok == [t EXCEPT !.ok = TRUE, !.once = FALSE] IN
            IF Owns(r, w) THEN tr' = [tr EXCEPT ![r][w] = ok] /\ rec' = [rec EXCEPT ![w] = Record(r, ok)] /\ UNCHANGED <<permit, asks, knows, marked>>
            ELSE Forget(r, w) /\ UNCHANGED <<rec, permit, asks, knows, marked>>
       ELSE IF ~t.once /\ st[t.run] = "open" /\ asks[t.run] = "asking" \* the activity that waits is completed
       THEN /\ asks' = [asks EXCEPT ![t.run] = "done"] /\ knows' = [knows EXCEPT ![t.run] = t.f]
            /\ marked' = [marked EXCEPT ![t.run] = {t.f}] /\ UNCHANGED <<tr, rec, permit>>
       ELSE /\ ~On("undelivered grants expire")
            /\ permit' = [permit EXCEPT !.left = Lease] /\ UNCHANGED <<tr, rec, asks, knows, marked>>
    /\ UNCHANGED <<tomb, heard, alive, up, st, told, left, data, late, budget>>

(* The completion is repeated after its reply was lost, or by the next relay: NOT_FOUND. *)
CompleteAgain(r, w) ==
    LET t == tr[r][w] IN
    /\ ~On("NOT_FOUND is no answer") /\ Known(r, w) /\ t.f > 0 /\ ~t.ok /\ ~t.once /\ ~t.end /\ asks[t.run] = "done" /\ Held(t.f)
    /\ permit' = Free /\ Forget(r, w)
    /\ UNCHANGED <<tomb, rec, heard, alive, up, runs, late, budget>>

(* _requeue_after_lapse: a grant that nobody knows of expired. Who asked by a local activity had its answer. *)
Requeue(r, w) ==
    LET t == tr[r][w] IN
    /\ Known(r, w) /\ up /\ t.f > 0 /\ ~t.ok /\ ~t.end /\ ~Held(t.f) /\ ~IsRecorded(t)
    /\ IF t.once \/ ~Owns(r, w) \/ asks[t.run] # "asking"
       THEN Forget(r, w) /\ rec' = IF Owns(r, w) THEN [rec EXCEPT ![w] = NoRecord] ELSE rec
       ELSE LET again == [t EXCEPT !.f = 0] IN tr' = [tr EXCEPT ![r][w] = again] /\ rec' = [rec EXCEPT ![w] = Record(r, again)]
    /\ UNCHANGED <<permit, tomb, heard, alive, up, runs, late, budget>>

(* _keep and _may_renew. *)
MayRenew(t) == t.ok /\ ~t.end /\ (t.win # 0 \/ ~On("time to adopt")) /\ (t.dumb < Grace \/ ~On("grace while nothing is known"))
Renew(r, w) ==
    LET t == tr[r][w] IN
    /\ Known(r, w) /\ MayRenew(t) /\ Held(t.f) /\ permit.left < Lease
    /\ permit' = [permit EXCEPT !.left = Lease]
    /\ UNCHANGED <<tomb, rec, heard, tr, alive, up, runs, late, budget>>

(* The permit is gone. Whose record was dropped has released it; else the run, or its successor, is told. A record that
   is missing because Redis lost its data is claimed again. *)
Lose(r, w) ==
    LET t == tr[r][w] IN
    /\ Known(r, w) /\ up /\ t.f > 0 /\ (t.ok \/ IsRecorded(t)) /\ ~t.end /\ ~Held(t.f)
    /\ IF Owns(r, w) \/ (rec[w] = NoRecord /\ budget.wipe < Wipes /\ On("claim again after a loss of data"))
       THEN /\ told' = [run \in Runs |-> told[run] \/ (st[run] = "open" /\ Of(run) = w /\ t.win = -1 /\ knows[run] = t.f)]
            /\ rec' = [rec EXCEPT ![w] = NoRecord]
       ELSE UNCHANGED <<told, rec>>
    /\ Forget(r, w)
    /\ UNCHANGED <<permit, tomb, heard, alive, up, st, asks, knows, marked, left, data, late, budget>>

(* RunMonitor and _on_state: the chain of runs is followed to the one that is open. *)
Fate(run) ==
    CASE st[run] = "open" -> "open"
      [] st[run] = "continued" /\ On("continued runs are followed") -> IF st["A2"] = "open" THEN "continued" ELSE "closed"
      [] st[run] = "reset" /\ On("resets are followed") -> IF st["A2"] = "open" THEN "reset" ELSE "closed"
      [] OTHER -> "closed"
Look(r, w) ==
    LET t == tr[r][w]
        fate == Fate(t.run)
        answered == [t EXCEPT !.dumb = 0]
        moved == [Tracker("A2", 0, t.f, FALSE, FALSE) EXCEPT !.rel = t.rel]
    IN
    /\ Known(r, w) /\ up /\ ~t.end
    /\ CASE fate = "open" -> tr' = [tr EXCEPT ![r][w] = [answered EXCEPT !.win = -1]] /\ UNCHANGED rec
         [] fate = "closed" -> /\ On("a closed run holds nothing") /\ UNCHANGED rec
                               /\ tr' = [tr EXCEPT ![r][w] = [answered EXCEPT !.end = TRUE]]
         [] fate = "continued" -> UNCHANGED rec /\ tr' = [tr EXCEPT ![r][w] =
                IF t.win # -1 THEN answered ELSE [answered EXCEPT !.win = Window, !.end = (t.f = 0)]]
         [] fate = "reset" -> IF Owns(r, w) THEN tr' = [tr EXCEPT ![r][w] = moved] /\ rec' = [rec EXCEPT ![w] = Record(r, moved)]
                              ELSE Forget(r, w) /\ UNCHANGED rec
    /\ UNCHANGED <<permit, tomb, heard, alive, up, runs, late, budget>>

(* _run_closed: by the fence, if the history of its run has that grant; else what its request has, which others may share.
   Then its record is dropped, if it is still its own. *)
GiveBack(r, w) ==
    LET t == tr[r][w]
        known == t.f > 0 /\ (t.ok \/ IsRecorded(t) \/ ~On("give back what was recorded"))
        rest == permit.by \ {<<t.run, t.salt>>}
        hit == IF ~On("release by fence") THEN permit.left > 0 ELSE IF known THEN Held(t.f) ELSE permit.left > 0 /\ rest = {}
    IN
    /\ Known(r, w) /\ t.end
    /\ permit' = IF hit THEN Free ELSE IF known THEN permit ELSE [permit EXCEPT !.by = rest]
    /\ tomb' = tomb \cup {<<t.run, t.salt>>}
    /\ rec' = IF Owns(r, w) THEN [rec EXCEPT ![w] = NoRecord] ELSE rec
    /\ Forget(r, w)
    /\ UNCHANGED <<heard, alive, up, runs, late, budget>>

(* RecordedRelease: the permit is released once the history has the marker. *)
CarryOut(r, w) ==
    LET t == tr[r][w] IN
    /\ Known(r, w) /\ up /\ t.rel > 0 /\ (t.rel \in left[t.run].done \/ ~On("release when it is recorded"))
    /\ permit' = IF Held(t.rel) THEN Free ELSE permit
    /\ rec' = IF Owns(r, w) THEN [rec EXCEPT ![w] = NoRecord] ELSE rec
    /\ Forget(r, w)
    /\ UNCHANGED <<tomb, heard, alive, up, runs, late, budget>>

(* beat.lua: who was silent for too long forgets what others may have taken over. *)
Beat(r) ==
    /\ r \in alive \ heard /\ heard' = heard \cup {r}
    /\ tr' = [tr EXCEPT ![r] = [w \in Workflows |-> IF Owns(r, w) THEN @[w] ELSE NoTracker]]
    /\ UNCHANGED <<permit, tomb, rec, alive, up, runs, late, budget>>

(* inherit.lua *)
Inherit(r, from, w) ==
    LET known == rec[w] IN
    /\ On("records are taken over") /\ r \in alive /\ r # from /\ from \notin heard /\ known.owner = from
    /\ rec' = [rec EXCEPT ![w].owner = r]
    /\ tr' = [tr EXCEPT ![r][w] = FromRecord(known)]
    /\ UNCHANGED <<permit, tomb, heard, alive, up, runs, late, budget>>

(* _find_untracked: what a claim without an answer has made its own. *)
FindUnheard(r, w) ==
    LET known == rec[w] IN
    /\ On("what is its own is looked for") /\ r \in alive /\ Owns(r, w) /\ ~tr[r][w].on
    /\ tr' = [tr EXCEPT ![r][w] = FromRecord(known)]
    /\ UNCHANGED <<permit, tomb, rec, heard, alive, up, runs, late, budget>>

-----------------------------------------------------------------------------
(* Time and faults.                                                           *)

Tick ==
    /\ permit' = [permit EXCEPT !.left = Less(@)]
    /\ tr' = [r \in Relays |-> [w \in Workflows |->
                [tr[r][w] EXCEPT !.win = Less(@), !.dumb = IF up \/ ~tr[r][w].on \/ @ = Grace THEN @ ELSE @ + 1]]]
    /\ tr' # tr \/ permit' # permit
    /\ UNCHANGED <<tomb, rec, heard, alive, up, runs, late, budget>>

Crash(r) ==
    /\ r \in alive /\ Spend("crash") /\ alive' = alive \ {r}
    /\ tr' = [tr EXCEPT ![r] = [w \in Workflows |-> NoTracker]]
    /\ heard' = heard \ {r} /\ late' = {one \in late : one[2] # r}
    /\ UNCHANGED <<permit, tomb, rec, up, runs>>

(* It stands still for longer than its lease, or Redis does not hear it. *)
Stall(r) ==
    /\ r \in heard /\ Spend("stall") /\ heard' = heard \ {r}
    /\ UNCHANGED <<permit, tomb, rec, tr, alive, up, runs, late>>

(* Relays know it by another generation of the registry, and forget nothing then. *)
Wipe ==
    /\ Spend("wipe") /\ permit' = Free /\ tomb' = {} /\ rec' = [w \in Workflows |-> NoRecord]
    /\ UNCHANGED <<heard, tr, alive, up, runs, late>>

Outage ==
    /\ up /\ Spend("outage") /\ up' = FALSE
    /\ UNCHANGED <<permit, tomb, rec, heard, tr, alive, runs, late>>

-----------------------------------------------------------------------------

Init ==
    /\ permit = Free /\ tomb = {} /\ rec = [w \in Workflows |-> NoRecord] /\ heard = Relays
    /\ tr = [r \in Relays |-> [w \in Workflows |-> NoTracker]] /\ alive = Relays /\ up = TRUE
    /\ st = [run \in Runs |-> IF run = "A1" THEN "open" ELSE "none"] /\ asks = [run \in Runs |-> "no"]
    /\ knows = [run \in Runs |-> 0] /\ marked = [run \in Runs |-> {}] /\ told = [run \in Runs |-> FALSE]
    /\ left = [run \in Runs |-> [asked |-> 0, done |-> {}]] /\ data = 0 /\ late = {}
    /\ budget = [double |-> Doubles, release |-> Releases, succession |-> Successions, handover |-> Handovers, end |-> Ends,
                 crash |-> Crashes, stall |-> Stalls, lose |-> Losses, wipe |-> Wipes, outage |-> Outages]

OfRun(run) == End(run) \/ RecordRelease(run) \/ ExecuteAgain(run) \/ GiveUp(run) \/ \E r \in Relays : Ask(run, r) \/ AskTwice(run, r) \/ Mark(run, r) \/ Release(run, r)
                                            \/ ReleaseUnrecorded(run, r) \/ Adopt(run, r) \/ Enqueue(run, r)
Work(r, w) == Acquire(r, w) \/ Deliver(r, w) \/ CompleteAgain(r, w) \/ Requeue(r, w) \/ Lose(r, w) \/ GiveBack(r, w) \/ CarryOut(r, w)
Next ==
    \/ \E run \in Runs : OfRun(run)
    \/ Continue \/ Reset \/ HandOver \/ Tick \/ Wipe \/ Outage
    \/ \E r \in Relays : Beat(r) \/ Crash(r) \/ Stall(r)
    \/ \E r \in Relays, w \in Workflows : \/ Work(r, w) \/ Renew(r, w) \/ Look(r, w) \/ FindUnheard(r, w)
                                          \/ \E from \in Relays : Inherit(r, from, w)

(* Who lives goes on, tasks are executed again until they are recorded, and time passes. Nobody need renew anything. *)
Progress == \/ \E r \in Relays, w \in Workflows : Work(r, w) \/ Look(r, w) \/ FindUnheard(r, w) \/ \E from \in Relays : Inherit(r, from, w)
            \/ \E r \in Relays : Beat(r)
Fair ==
    /\ WF_vars(Tick) /\ WF_vars(Progress)
    /\ WF_vars(\E run \in Runs, r \in Relays : Enqueue(run, r)) /\ WF_vars(\E run \in Runs, r \in Relays : asks[run] = "asking" /\ Ask(run, r))
    /\ SF_vars(\E run \in Runs, r \in Relays : Mark(run, r))

Symmetry == Permutations(Relays)
Spec == Init /\ [][Next]_vars
FairSpec == Spec /\ Fair

-----------------------------------------------------------------------------
(* What is promised: docs/temporal.md.                                        *)

(* A relay never releases a permit that an open run holds. (`Release` and the others are steps of runs.) *)
OpenRunsKeep == [][\A run \in Runs : st[run] = "open" /\ knows[run] > 0 /\ Held(knows[run]) /\ permit' = Free =>
    knows'[run] = 0 \/ budget'.wipe < budget.wipe]_vars

(* One run at most believes to hold. *)
OneHolder == \A a, b \in Runs : a # b /\ Held(knows[a]) => knows[b] # knows[a]

(* A permit of which no open run knows, and which none is about to be told of, does not stay; nor one that nobody adopts. *)
Wanted(f) == \E run \in Runs : st[run] = "open" /\ (knows[run] = f \/ asks[run] = "asking")
Unwanted == permit.left > 0 /\ ~Wanted(permit.f)
NothingKept == []<>~Unwanted

(* Who asks gets its permit, while a relay lives and the Temporal server answers. *)
Served == \A run \in Runs :
    (asks[run] = "asking") ~> (asks[run] = "done" \/ st[run] # "open" \/ alive = {} \/ ~up)

(* What a dead relay had, and what one does not know to be its own, is looked after by one that lives. *)
LookedAfter == \A w \in Workflows :
    (rec[w].owner # "") ~> (rec[w] = NoRecord \/ alive = {} \/ \E r \in alive : tr[r][w].on)

(* A run that goes on without its permit is told so. *)
LossIsTold == \A run \in Runs :
    (st[run] = "open" /\ knows[run] > 0 /\ ~Held(knows[run]))
        ~> (told[run] \/ st[run] # "open" \/ knows[run] = 0 \/ alive = {} \/ ~up)
=============================================================================
