package redlease;

import com.fasterxml.jackson.annotation.JsonProperty;
import io.temporal.failure.ApplicationFailure;
import io.temporal.failure.CanceledFailure;
import io.temporal.failure.TemporalFailure;
import io.temporal.workflow.CancellationScope;
import io.temporal.workflow.Functions;
import io.temporal.workflow.NexusOperationOptions;
import io.temporal.workflow.NexusServiceOptions;
import io.temporal.workflow.Workflow;
import io.temporal.workflow.WorkflowInfo;
import io.temporal.workflow.WorkflowLocal;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.Map;
import java.util.Set;

/**
 * The locks of a redlease lock service for workflows, by Nexus.
 *
 * <p>It is one file: copy it into your project. It needs Java 11, and is tested with io.temporal:temporal-sdk 1.38.
 *
 * <pre>{@code
 * Locks locks = new Locks("redlease-locks");
 * String model = locks.withPermit("gpu", 3, permit -> activities.train(permit.fence));
 * }</pre>
 */
public final class Locks {
    private static final String SERVICE = "redlease";
    private static final Duration ANSWER = Duration.ofSeconds(10); // how long an operation that does not wait may take

    private static final int TICKET_BYTES = 256; // how long a ticket may be
    private static final Set<String> REFUSALS =
            Set.of("AcquireTimeout", "QueueFull", "LeaseLost", "Withdrawn", "Superseded", "ValueError");
    private static final WorkflowLocal<Integer> ASKED = WorkflowLocal.withCachedInitial(() -> 0); // the requests of a run

    private final String endpoint;

    /** The locks of the service behind a Nexus endpoint. */
    public Locks(String endpoint) {
        this.endpoint = endpoint;
    }

    /**
     * Runs the body under a permit, and releases it when the body returns, fails or is canceled.
     *
     * <p>The service releases the permit of a run that closes inside the body. Of an exception that fails the workflow
     * task alone, Temporal executes that again, under the same permit. {@code Workflow.continueAsNew} ends a run where it
     * is called: call it after the block, not inside.
     *
     * @throws TemporalFailure as {@link #acquire} does, and that of the body
     */
    public <R> R withPermit(String resource, int capacity, Functions.Func1<Permit, R> body) {
        return withPermit(resource, capacity, new Options(), body);
    }

    /** The same with options. */
    public <R> R withPermit(String resource, int capacity, Options options, Functions.Func1<Permit, R> body) {
        Permit permit = acquire(resource, capacity, options);
        R result;
        try {
            result = body.apply(permit);
        } catch (TemporalFailure ending) {
            tryToRelease(permit);
            throw ending;
        }
        tryToRelease(permit);
        return result;
    }

    /**
     * Waits for a permit, which the service renews while this run is open.
     *
     * @throws TemporalFailure one that has a {@link #refusal}, that of a cancellation, or one that says that the service
     *     did not answer; the request is then out of the queue
     */
    public Permit acquire(String resource, int capacity, Options options) {
        String ticket = nextTicket();
        Duration limit = options.timeout == null ? null : options.timeout.plus(ANSWER);
        try {
            Permit permit = call("acquire", new Acquire(resource, capacity, ticket, options), limit, Permit.class);
            if (CancellationScope.current().isCancelRequested()) {
                throw new CanceledFailure("canceled while it waited for " + resource);
            }
            return permit;
        } catch (TemporalFailure failure) {
            if (refusal(failure).isEmpty()) {
                end(new Release(resource, ticket, null), options.lease);
            }
            throw failure;
        }
    }

    /** Gives a permit back, also after a cancellation; tells whether it was still held. */
    public boolean release(Permit permit) {
        return end(new Release(permit.resource, permit.ticket, permit.fence), Duration.ofMillis(permit.leaseMs));
    }

    /** Asks whether a permit is held now. */
    public boolean check(Permit permit) {
        return call("check", new Release(permit.resource, permit.ticket, permit.fence), ANSWER, Checked.class).held;
    }

    /** Takes over a permit from the run that this one continues as new, which did not release it. */
    public Permit adopt(Permit permit) {
        return call("adopt", new Adopt(permit), ANSWER, Permit.class);
    }

    /** The name of the service's error: AcquireTimeout, QueueFull, LeaseLost, Withdrawn, Superseded or ValueError; or "". */
    public static String refusal(Throwable failure) {
        for (Throwable cause = failure; cause != null; cause = cause.getCause()) {
            if (cause instanceof ApplicationFailure) {
                String type = ((ApplicationFailure) cause).getType();
                if (REFUSALS.contains(type)) {
                    return type;
                }
            }
        }
        return "";
    }

    /** Returns a name that is the same in every replay and after a reset: the new run finds what the old one had. */
    private static String nextTicket() {
        WorkflowInfo run = Workflow.getInfo();
        ASKED.set(ASKED.get() + 1);
        String ticket = run.getOriginalExecutionRunId() + "/" + ASKED.get();
        String full = String.join("/", run.getNamespace(), run.getWorkflowId(), ticket);
        return full.getBytes(StandardCharsets.UTF_8).length <= TICKET_BYTES ? full : ticket;
    }

    private void tryToRelease(Permit permit) {
        try {
            release(permit);
        } catch (TemporalFailure unanswered) {
            // The service releases it when this run has closed.
        }
    }

    private boolean end(Release release, Duration lease) {
        boolean[] released = new boolean[1];
        Workflow.newDetachedCancellationScope(
                        () -> released[0] = call("release", release, lease.plus(ANSWER), Released.class).released)
                .run();
        return released[0];
    }

    private <R> R call(String operation, Object input, Duration limit, Class<R> result) {
        NexusOperationOptions.Builder options = NexusOperationOptions.newBuilder();
        if (limit != null) {
            options.setScheduleToCloseTimeout(limit);
        }
        NexusServiceOptions service =
                NexusServiceOptions.newBuilder().setEndpoint(endpoint).setOperationOptions(options.build()).build();
        return Workflow.newUntypedNexusServiceStub(SERVICE, service).execute(operation, result, input);
    }

    /** The right to use {@code weight} units of a resource until its lease ends. Times are ms of the Redis server's clock. */
    public static final class Permit {
        public String resource;
        public String ticket;
        public long fence;
        public int weight;
        public int capacity;

        @JsonProperty("lease_ms")
        public long leaseMs;

        @JsonProperty("granted_at_ms")
        public long grantedAtMs;

        @JsonProperty("expires_at_ms")
        public long expiresAtMs;

        public String owner;
        public Map<String, String> metadata;
        public String key;
    }

    /** Options of a request. */
    public static final class Options {
        private Duration lease = Duration.ofSeconds(30);
        private Duration timeout;
        private int weight = 1;
        private Duration maxHold;
        private String key = "";
        private double share = 1;

        /** How long the permit stays valid without renewal: by default 30 s. */
        public Options lease(Duration value) {
            lease = value;
            return this;
        }

        /** How long to wait: by default without limit; not at all if it is negative, as that of a deadline in the past. */
        public Options timeout(Duration value) {
            timeout = value != null && value.isNegative() ? Duration.ZERO : value;
            return this;
        }

        /** Units to hold: by default 1. */
        public Options weight(int value) {
            weight = value;
            return this;
        }

        /** After this the permit is no longer renewed: by default never. */
        public Options maxHold(Duration value) {
            maxHold = value;
            return this;
        }

        /** Requests of different keys take turns. */
        public Options key(String value) {
            key = value;
            return this;
        }

        /** How large a share of the turns the key gets: by default 1. */
        public Options share(double value) {
            share = value;
            return this;
        }
    }

    private static final class Acquire {
        public final String resource;
        public final int capacity;
        public final String ticket;
        public final int weight;

        @JsonProperty("lease_ms")
        public final long leaseMs;

        @JsonProperty("timeout_ms")
        public final Long timeoutMs;

        @JsonProperty("max_hold_ms")
        public final Long maxHoldMs;

        public final String key;
        public final double share;

        Acquire(String resource, int capacity, String ticket, Options options) {
            this.resource = resource;
            this.capacity = capacity;
            this.ticket = ticket;
            weight = options.weight;
            leaseMs = options.lease.toMillis();
            timeoutMs = options.timeout == null ? null : options.timeout.toMillis();
            maxHoldMs = options.maxHold == null ? null : options.maxHold.toMillis();
            key = options.key;
            share = options.share;
        }
    }

    private static final class Release {
        public final String resource;
        public final String ticket;
        public final Long fence;

        Release(String resource, String ticket, Long fence) {
            this.resource = resource;
            this.ticket = ticket;
            this.fence = fence;
        }
    }

    private static final class Adopt {
        public final Permit permit;

        Adopt(Permit permit) {
            this.permit = permit;
        }
    }

    private static final class Released {
        public boolean released;
    }

    private static final class Checked {
        public boolean held;
    }
}
