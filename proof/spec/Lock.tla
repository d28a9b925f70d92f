-------------------------------- MODULE Lock --------------------------------
(* The protocol of one resource: clients, the server's scripts, leases, the   *)
(* queue, and a network that loses, delays and doubles messages. Each script  *)
(* in redlease/_core/lua is one operator below, with the same name; a comment says  *)
(* what it stands for. `Off` names rules that are turned off: each must make  *)
(* a property fail (docs/proof.md has the table).                             *)
(*                                                                            *)
(* Times are counted in ticks that are left, so that nothing grows without a  *)
(* bound. `clock` is the server's time and only the fence reads it, as in the *)
(* scripts. A process that is stopped is one that takes no step for a while;  *)
(* its timers go on, as CLOCK_BOOTTIME does.                                  *)
(*                                                                            *)
(* Left out: weights other than 1, priorities, lock delays, adoption, tickets *)
(* that several clients share, full queues, and the batch limit of a call.    *)
(* Assumed: no copy of a request stays in flight for longer than a tombstone. *)
EXTENDS Integers, Sequences, FiniteSets, TLC

CONSTANTS
    Clients,      \* each has one ticket, which it uses again for every request
    Capacity,
    Requests,     \* how many requests a client makes, one after the other
    Lease, WaiterLease,
    Clock,        \* where time ends; 0: it has no end, and fences are counted only
    Losses, Delays, Resends, Withdrawals, Crashes, Wipes, Steps, Writes, \* how many of each
    Off

VARIABLES
    srv,     \* the four keys: state, holders, queue, waiters
    clock,
    net,     \* messages in flight, either way
    pc, n, dup, until, mine, fence, dead, \* the clients
    budget,  \* how many faults are left
    top,     \* the highest fence ever granted, which outlives the server's data
    ended,   \* the last request of each client whose end the server confirmed
    calm,    \* ticks until a loss of data or a step of the clock has no effect any more
    accepted \* the fence of the last write that the resource accepted

vars == <<srv, clock, net, pc, n, dup, until, mine, fence, dead, budget, top, ended, calm, accepted>>
clients == <<pc, n, dup, until, mine, fence>>
ghosts == <<top, ended, calm, accepted>>

On(rule) == rule \notin Off
Max(a, b) == IF a > b THEN a ELSE b
Less(t) == Max(0, t - 1)
Scale == 10 \* fences in one tick: the clock of the fence runs much faster than leases
None == [n |-> 0, f |-> 0, left |-> 0]
Empty == [held |-> [c \in Clients |-> None], \* f > 0 and left = 0: expired, and not reaped yet
          queue |-> <<>>, asked |-> [c \in Clients |-> 0],
          place |-> [c \in Clients |-> 0], tomb |-> {}, last |-> 0, out |-> {}]

-----------------------------------------------------------------------------
(* The scripts: functions from the server's state and a request to its state  *)
(* afterwards, in which `out` is what they send.                              *)

Used(s) == Cardinality({c \in Clients : s.held[c].f > 0})
Waits(s, c) == \E i \in DOMAIN s.queue : s.queue[i] = c
Without(s, c) == [s EXCEPT !.queue = SelectSeq(@, LAMBDA other : other /= c), !.asked[c] = 0]
Message(kind, c, request, f, left, age, tomb) ==
    [kind |-> kind, c |-> c, n |-> request, f |-> f, left |-> left, age |-> age, tomb |-> tomb, late |-> FALSE]
Reply(s, m, kind, f) == [s EXCEPT !.out = @ \cup {Message(kind, m.c, m.n, f, 0, m.age, FALSE)}]

(* next_fence in state.lua: max(last + 1, time). *)
NextFence(s) ==
    CASE ~On("time in the fence") -> s.last + 1
      [] ~On("last fence + 1") -> clock * Scale + 1
      [] OTHER -> Max(s.last + 1, clock * Scale)

(* make_holder in state.lua *)
MakeHolder(s, c, request, left) ==
    LET f == NextFence(s) IN [s EXCEPT !.held[c] = [n |-> request, f |-> f, left |-> left], !.last = f]

(* reap in queue.lua *)
Reap(s) ==
    IF ~On("reap") THEN s
    ELSE [s EXCEPT !.held = [c \in Clients |-> IF s.held[c].left = 0 THEN None ELSE s.held[c]]]

(* grant_waiting in queue.lua: from the head, dead waiters removed, the first lease being what is left of the place. *)
RECURSIVE GrantWaiting(_)
GrantWaiting(s) ==
    LET r == IF Used(s) >= Capacity THEN Reap(s) ELSE s IN
    IF r.queue = <<>> \/ (Used(r) >= Capacity /\ On("capacity")) THEN r
    ELSE LET c == Head(r.queue) IN
         IF r.place[c] = 0
         THEN IF On("remove dead waiters") THEN GrantWaiting(Without(r, c)) ELSE r
         ELSE LET g == MakeHolder(r, c, r.asked[c], r.place[c])
                  push == Message("push", c, r.asked[c], g.last, r.place[c], 0, FALSE)
              IN GrantWaiting([Without(g, c) EXCEPT !.out = @ \cup {push}])

(* The end of acquire.lua, for a ticket that has neither a permit nor a live place. *)
Enter(s, m) ==
    LET r == IF On("behind the queue") THEN GrantWaiting(s) ELSE Reap(s)
        s1 == IF r.queue = <<>> /\ Used(r) >= Capacity THEN Reap(r) ELSE r IN
    IF Used(s1) < Capacity /\ (s1.queue = <<>> \/ ~On("behind the queue"))
    THEN LET g == MakeHolder(s1, m.c, m.n, Lease) IN Reply(g, m, "granted", g.last)
    ELSE Reply([s1 EXCEPT !.queue = Append(@, m.c), !.asked[m.c] = m.n, !.place[m.c] = WaiterLease], m, "queued", 0)

(* acquire.lua; a request that comes again has what it had. A place that lapsed counts as a new one (a new epoch). *)
Acquire(s, m) ==
    LET h == s.held[m.c] IN
    IF <<m.c, m.n>> \in s.tomb THEN s
    ELSE IF h.f > 0 /\ h.left > 0 /\ On("same permit again")
    THEN Reply([s EXCEPT !.held[m.c] = [n |-> m.n, f |-> h.f, left |-> Lease]], m, "granted", h.f)
    ELSE IF Waits(s, m.c) /\ s.place[m.c] > 0 /\ On("same place again")
    THEN LET g == GrantWaiting([s EXCEPT !.asked[m.c] = m.n, !.place[m.c] = Max(@, WaiterLease)]) IN
         IF Waits(g, m.c) THEN Reply(g, m, "queued", 0)
         ELSE Reply([g EXCEPT !.held[m.c].left = Lease], m, "granted", g.held[m.c].f)
    ELSE Enter([Without(s, m.c) EXCEPT !.held[m.c] = None], m)

(* beat.lua: "gone" is its reply GRANTED, by which a client asks after a grant whose message was lost. *)
Beat(s, m) ==
    IF s.place[m.c] = 0 THEN Reply(s, m, "lapsed", 0)
    ELSE LET g == GrantWaiting([s EXCEPT !.place[m.c] = WaiterLease]) IN
         Reply(g, m, IF Waits(g, m.c) \/ ~On("ask after grants") THEN "kept" ELSE "gone", 0)

(* renew.lua: an expired permit is never revived. *)
Renew(s, m) ==
    LET h == s.held[m.c] IN
    IF h.f = m.f /\ (h.left > 0 \/ ~On("no revival"))
    THEN Reply([s EXCEPT !.held[m.c].left = Lease], m, "renewed", m.f)
    ELSE Reply(s, m, "lost", m.f)

(* release.lua: by fence (of a hold) or by request (a withdrawal); a tombstone where copies of the request may be about. *)
Release(s, m) ==
    LET h == s.held[m.c]
        hit == IF m.f > 0 THEN h.f = m.f \/ (~On("release by fence") /\ h.f > 0) ELSE h.f > 0 /\ h.n = m.n
        freed == [s EXCEPT !.held[m.c] = IF hit THEN None ELSE h,
                           !.tomb = IF m.tomb /\ On("tombstones") THEN @ \cup {<<m.c, m.n>>} ELSE @]
        left == IF m.f = 0 /\ freed.asked[m.c] = m.n THEN Without(freed, m.c) ELSE freed
    IN Reply(GrantWaiting(left), m, "done", 0)

Scripts == {"acquire", "beat", "renew", "release"}
Run(s, m) == CASE m.kind = "acquire" -> Acquire(s, m) [] m.kind = "beat" -> Beat(s, m)
               [] m.kind = "renew" -> Renew(s, m) [] m.kind = "release" -> Release(s, m)

Execute(m) ==
    /\ m.kind \in Scripts
    /\ LET s == Run(srv, m) IN
       /\ srv' = [s EXCEPT !.out = {}]
       /\ net' = (net \ {m}) \cup s.out
       /\ top' = Max(top, s.last)
    /\ UNCHANGED <<clock, clients, dead, budget, ended, calm, accepted>>

-----------------------------------------------------------------------------
(* The clients: session/queueing.py, session/leases.py and hold.py.           *)

Send(kind, c, request, f, tomb) == net' = net \cup {Message(kind, c, request, f, 0, 0, tomb)}
InFlight(c, kinds) == \E m \in net : m.c = c /\ m.kind \in kinds
Believes(c) == pc[c] = "holding" /\ until[c] > 0 \* `hold.lost` is false: a comparison with the local clock
Unchanged == UNCHANGED <<srv, clock, dead, ghosts>>

Ask(c) ==
    /\ pc[c] = "idle" /\ n[c] < Requests
    /\ pc' = [pc EXCEPT ![c] = "asking"] /\ n' = [n EXCEPT ![c] = @ + 1] /\ dup' = [dup EXCEPT ![c] = FALSE]
    /\ Send("acquire", c, n[c] + 1, 0, FALSE)
    /\ until' = [until EXCEPT ![c] = 0] /\ mine' = [mine EXCEPT ![c] = 0] /\ fence' = [fence EXCEPT ![c] = 0]
    /\ Unchanged /\ UNCHANGED budget

(* The connection was lost, or a beat said that the place is gone: the same request again. *)
AskAgain(c) ==
    /\ pc[c] = "asking" /\ ~InFlight(c, {"acquire", "granted", "queued"})
    /\ Send("acquire", c, n[c], 0, FALSE)
    /\ Unchanged /\ UNCHANGED <<clients, budget>>

(* A second copy while the first may still arrive: a client library's own retry. *)
Resend(c) ==
    /\ pc[c] = "asking" /\ budget.resend > 0
    /\ \A m \in net : m.c = c /\ m.kind = "acquire" => m.late
    /\ Send("acquire", c, n[c], 0, FALSE) /\ dup' = [dup EXCEPT ![c] = TRUE]
    /\ budget' = [budget EXCEPT !.resend = @ - 1]
    /\ Unchanged /\ UNCHANGED <<pc, n, until, mine, fence>>

SendBeat(c) ==
    /\ pc[c] = "queued" /\ mine[c] \in 1..(WaiterLease - 1) /\ ~InFlight(c, {"beat", "kept", "gone", "lapsed"})
    /\ Send("beat", c, n[c], 0, FALSE)
    /\ Unchanged /\ UNCHANGED <<clients, budget>>

SendRenew(c) ==
    /\ Believes(c) /\ until[c] < Lease /\ ~InFlight(c, {"renew", "renewed", "lost"})
    /\ Send("renew", c, n[c], fence[c], FALSE)
    /\ Unchanged /\ UNCHANGED <<clients, budget>>

(* The release of a hold: with a tombstone if more than one copy of its acquire was sent. *)
SendRelease(c) ==
    /\ Believes(c)
    /\ Send("release", c, n[c], fence[c], dup[c]) /\ pc' = [pc EXCEPT ![c] = "leaving"]
    /\ Unchanged /\ UNCHANGED <<n, dup, until, mine, fence, budget>>

(* A cancelled or timed out acquire, whose outcome may be unknown. *)
Withdraw(c) ==
    /\ pc[c] \in {"asking", "queued"} /\ budget.withdraw > 0
    /\ Send("release", c, n[c], 0, dup[c] \/ pc[c] = "asking")
    /\ pc' = [pc EXCEPT ![c] = "leaving"] /\ fence' = [fence EXCEPT ![c] = 0]
    /\ budget' = [budget EXCEPT !.withdraw = @ - 1]
    /\ Unchanged /\ UNCHANGED <<n, dup, until, mine>>

(* No answer came: again, and a copy of it may still arrive, later than the answer to this one. *)
SendReleaseAgain(c) ==
    /\ pc[c] = "leaving" /\ ~InFlight(c, {"done"})
    /\ \A m \in net : m.c = c /\ m.kind = "release" => m.late /\ budget.resend > 0
    /\ Send("release", c, n[c], fence[c], TRUE)
    /\ budget' = IF InFlight(c, {"release"}) THEN [budget EXCEPT !.resend = @ - 1] ELSE budget
    /\ Unchanged /\ UNCHANGED clients

(* The lease has ended by the local clock: the permit is lost, and what the request may still have is given up. *)
Lapse(c) ==
    /\ pc[c] = "holding" /\ until[c] = 0
    /\ Send("release", c, n[c], 0, dup[c])
    /\ pc' = [pc EXCEPT ![c] = "leaving"] /\ fence' = [fence EXCEPT ![c] = 0]
    /\ Unchanged /\ UNCHANGED <<n, dup, until, mine, budget>>

(* The place has ended by the local clock: the request is sent again, from a new place. *)
LosePlace(c) ==
    /\ pc[c] = "queued" /\ mine[c] = 0
    /\ pc' = [pc EXCEPT ![c] = "asking"]
    /\ Unchanged /\ UNCHANGED <<n, dup, until, mine, fence, net, budget>>

(* A holder writes to the resource; the write may be on its way for long. *)
Write(c) ==
    /\ Believes(c) /\ budget.write > 0
    /\ Send("write", c, n[c], fence[c], FALSE) /\ budget' = [budget EXCEPT !.write = @ - 1]
    /\ Unchanged /\ UNCHANGED clients

(* What a message changes at its client: <<pc, until, mine, fence>>. A local deadline is counted from when the request that
   set it was sent. That of a grant by message is the place's, which this client's own beats set, and no later than the
   message says: it may be late, and the place extended since. *)
Received(m) ==
    LET c == m.c
        same == <<pc[c], until[c], mine[c], fence[c]>>
        current == m.n = n[c]
        from == IF On("deadline from the sending") THEN m.age ELSE 0
        lasts == CASE ~On("first lease is the place's") -> Lease
                   [] ~On("late grants end early") -> mine[c]
                   [] OTHER -> IF mine[c] < m.left - m.age THEN mine[c] ELSE Max(0, m.left - m.age)
    IN CASE m.kind = "granted" /\ pc[c] \in {"asking", "queued"} /\ current ->
              IF Lease - from > 0 THEN <<"holding", Lease - from, 0, m.f>> ELSE <<"asking", 0, 0, 0>>
         [] m.kind = "queued" /\ pc[c] = "asking" /\ current -> <<"queued", 0, Max(0, WaiterLease - m.age), 0>>
         [] m.kind = "push" /\ pc[c] \in {"asking", "queued"} /\ (current \/ ~On("request id in messages")) -> \* or it asks again
              IF lasts > 0 THEN <<"holding", lasts, 0, m.f>> ELSE <<"asking", 0, mine[c], 0>>
         [] m.kind = "kept" /\ pc[c] = "queued" /\ current -> <<"queued", 0, Max(mine[c], WaiterLease - m.age), 0>>
         [] m.kind = "gone" /\ pc[c] = "queued" /\ current -> <<"asking", 0, Max(mine[c], WaiterLease - m.age), 0>>
         [] m.kind = "lapsed" /\ pc[c] = "queued" /\ current -> <<"asking", 0, 0, 0>>
         [] m.kind = "renewed" /\ Believes(c) /\ m.f = fence[c] -> <<"holding", Max(until[c], Lease - from), 0, m.f>>
         [] m.kind = "lost" /\ pc[c] = "holding" /\ m.f = fence[c] -> <<"idle", 0, 0, 0>>
         [] m.kind = "done" /\ pc[c] = "leaving" /\ current -> <<"idle", 0, 0, 0>>
         [] OTHER -> same

Receive(m) ==
    /\ m.kind \notin Scripts \cup {"write"}
    /\ net' = net \ {m}
    /\ LET after == IF m.c \in dead THEN <<pc[m.c], until[m.c], mine[m.c], fence[m.c]>> ELSE Received(m) IN
       /\ pc' = [pc EXCEPT ![m.c] = after[1]] /\ until' = [until EXCEPT ![m.c] = after[2]]
       /\ mine' = [mine EXCEPT ![m.c] = after[3]] /\ fence' = [fence EXCEPT ![m.c] = after[4]]
       /\ ended' = IF m.kind = "done" /\ after[1] /= pc[m.c] THEN [ended EXCEPT ![m.c] = m.n] ELSE ended
    /\ UNCHANGED <<srv, clock, n, dup, dead, budget, top, calm, accepted>>

(* The resource: guards/lua/guard.lua refuses a fence older than one it has seen. *)
Arrive(m) ==
    /\ m.kind = "write"
    /\ net' = net \ {m}
    /\ accepted' = IF m.f >= accepted \/ ~On("guard") THEN m.f ELSE accepted
    /\ UNCHANGED <<srv, clock, clients, dead, budget, top, ended, calm>>

-----------------------------------------------------------------------------
(* Time and faults.                                                           *)

Passing == \* a tick for all but the server
    /\ Clock = 0 \/ clock < Clock
    /\ clock' = IF Clock = 0 THEN 0 ELSE clock + 1
    /\ net' = {[m EXCEPT !.age = IF @ < Max(Lease, WaiterLease) THEN @ + 1 ELSE @] : m \in net}
    /\ until' = [c \in Clients |-> Less(until[c])] /\ mine' = [c \in Clients |-> Less(mine[c])]
    /\ UNCHANGED <<pc, n, dup, fence, dead, top, ended, accepted>>

Aged(s, by) ==
    [s EXCEPT !.held = [c \in Clients |-> IF s.held[c].f = 0 THEN None
                                          ELSE [s.held[c] EXCEPT !.left = Max(0, @ + by)]],
              !.place = [c \in Clients |-> IF s.place[c] = 0 THEN 0 ELSE Max(0, s.place[c] + by)]]

Tick == Passing /\ srv' = Aged(srv, -1) /\ calm' = Less(calm) /\ UNCHANGED budget

(* The server dies and comes back without its data. That takes a tick, so that its clock has gone on. *)
Wipe ==
    /\ budget.wipe > 0 /\ Passing
    /\ srv' = Empty /\ calm' = Max(Lease, WaiterLease) /\ budget' = [budget EXCEPT !.wipe = @ - 1]

(* The server's clock is stepped by a tick, either way. *)
Step(by) ==
    /\ budget.step > 0 /\ clock + by \in 0..Clock
    /\ clock' = clock + by /\ srv' = Aged(srv, -by)
    /\ calm' = Max(Lease, WaiterLease) /\ budget' = [budget EXCEPT !.step = @ - 1]
    /\ UNCHANGED <<net, clients, dead, top, ended, accepted>>

Lose(m) ==
    /\ budget.lose > 0 /\ m.kind /= "write"
    /\ net' = net \ {m} /\ budget' = [budget EXCEPT !.lose = @ - 1]
    /\ UNCHANGED <<srv, clock, clients, dead, ghosts>>

Delay(m) ==
    /\ budget.delay > 0 /\ ~m.late
    /\ net' = (net \ {m}) \cup {[m EXCEPT !.late = TRUE]} /\ budget' = [budget EXCEPT !.delay = @ - 1]
    /\ UNCHANGED <<srv, clock, clients, dead, ghosts>>

Crash(c) ==
    /\ budget.crash > 0 /\ dead' = dead \cup {c} /\ budget' = [budget EXCEPT !.crash = @ - 1]
    /\ UNCHANGED <<srv, clock, net, clients, ghosts>>

-----------------------------------------------------------------------------

Init ==
    /\ srv = Empty /\ clock = 0 /\ net = {}
    /\ pc = [c \in Clients |-> "idle"] /\ n = [c \in Clients |-> 0] /\ dup = [c \in Clients |-> FALSE]
    /\ until = [c \in Clients |-> 0] /\ mine = until /\ fence = until /\ ended = until
    /\ dead = {} /\ top = 0 /\ calm = 0 /\ accepted = 0
    /\ budget = [lose |-> Losses, delay |-> Delays, resend |-> Resends, withdraw |-> Withdrawals, crash |-> Crashes, wipe |-> Wipes,
                 step |-> Steps, write |-> Writes]

(* A message arrives before anything else happens, unless it is late: then at any time. *)
Quiet == \A m \in net : m.late

Act(c) == c \notin dead /\ (\/ Ask(c) \/ AskAgain(c) \/ Resend(c) \/ SendBeat(c) \/ SendRenew(c) \/ SendRelease(c)
                            \/ Withdraw(c) \/ SendReleaseAgain(c) \/ Lapse(c) \/ LosePlace(c) \/ Write(c) \/ Crash(c))

Next ==
    \/ Quiet /\ ((\E c \in Clients : Act(c)) \/ Tick \/ Wipe \/ Step(1) \/ Step(-1))
    \/ \E m \in net : Execute(m) \/ Receive(m) \/ Arrive(m) \/ Lose(m) \/ Delay(m)

(* Who lives goes on, what is sent and not lost arrives, and time passes. *)
Fair(c) ==
    /\ WF_vars(Quiet /\ c \notin dead /\ AskAgain(c)) /\ WF_vars(Quiet /\ c \notin dead /\ SendBeat(c))
    /\ SF_vars(Quiet /\ c \notin dead /\ SendRelease(c)) /\ WF_vars(Quiet /\ c \notin dead /\ SendReleaseAgain(c))
    /\ WF_vars(Quiet /\ c \notin dead /\ Lapse(c)) /\ WF_vars(Quiet /\ c \notin dead /\ LosePlace(c))
    /\ WF_vars(\E m \in net : m.c = c /\ Execute(m)) /\ WF_vars(\E m \in net : m.c = c /\ Receive(m))

Symmetry == Permutations(Clients)
Spec == Init /\ [][Next]_vars
FairSpec == Spec /\ WF_vars(Quiet /\ Tick) /\ \A c \in Clients : Fair(c)

-----------------------------------------------------------------------------
(* What is promised; docs/proof.md lists P1 to P8.                           *)

Unexpired(s) == {c \in Clients : s.held[c].f > 0 /\ s.held[c].left > 0}

(* P1: at every instant there are at most as many unexpired permits as the capacity. *)
Exclusion == Cardinality(Unexpired(srv)) <= Capacity

(* P1, P5, P7: who believes to hold does, under its fence, for at least as long; over a loss or a step, after one lease. *)
BelieversHold == calm = 0 => \A c \in Clients : Believes(c) =>
    srv.held[c].f = fence[c] /\ srv.held[c].left >= until[c]

(* P1 as users see it; it follows from the two above. *)
BeliefsExclude == calm = 0 => Cardinality({c \in Clients : Believes(c)}) <= Capacity

(* P5, P6: what has ended for its client has nothing on the server, however late a copy of it comes. A loss of data, which
   takes the tombstones, and a step of the clock are excepted: what is left then lasts for a lease. *)
NothingLeft == budget.wipe = Wipes /\ budget.step = Steps => \A c \in Clients :
    /\ c \in Unexpired(srv) => srv.held[c].n > ended[c]
    /\ srv.asked[c] > 0 => srv.asked[c] > ended[c]

(* P2: nobody is granted while a live waiter is ahead of it, and live waiters keep their order. *)
Index(q, c) == CHOOSE i \in DOMAIN q : q[i] = c
Live(s, c) == Waits(s, c) /\ s.place[c] > 0
Granted(c) == srv'.held[c].f > srv.held[c].f
Fifo == [][
    /\ \A c, d \in Clients : Granted(c) /\ Live(srv, d) /\ Live(srv', d) =>
           Waits(srv, c) /\ Index(srv.queue, c) < Index(srv.queue, d)
    /\ \A c, d \in Clients : c /= d /\ Live(srv, c) /\ Live(srv, d) /\ Waits(srv', c) /\ Waits(srv', d) =>
           (Index(srv.queue, c) < Index(srv.queue, d) <=> Index(srv'.queue, c) < Index(srv'.queue, d))
    ]_vars

(* P3: each grant's fence is greater than all before, those before a loss of data included. *)
FencesGrow == [][\A c \in Clients : srv'.held[c].f > 0 /\ srv'.held[c].f /= srv.held[c].f => srv'.held[c].f > top]_vars

(* P8: an expired permit stays so. A step of the clock is excepted. *)
NoRevival == [][\A c \in Clients : srv.held[c].f > 0 /\ srv.held[c].left = 0 /\ srv'.held[c].f = srv.held[c].f =>
    srv'.held[c].left = 0 \/ budget'.step < budget.step]_vars

(* What the resource accepts comes in the order of the grants, however late a write of a stopped holder is. *)
WritesInOrder == [][accepted' >= accepted]_vars

(* P4: who waits and lives gets its permit. *)
Served == \A c \in Clients :
    (pc[c] \in {"asking", "queued"} /\ c \notin dead) ~> (pc[c] \in {"holding", "leaving"} \/ c \in dead)
=============================================================================
