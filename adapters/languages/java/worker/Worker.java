package worker;

import io.temporal.client.WorkflowClient;
import io.temporal.client.WorkflowClientOptions;
import io.temporal.failure.ApplicationFailure;
import io.temporal.failure.TemporalFailure;
import io.temporal.serviceclient.WorkflowServiceStubs;
import io.temporal.serviceclient.WorkflowServiceStubsOptions;
import io.temporal.worker.WorkerFactory;
import io.temporal.workflow.SignalMethod;
import io.temporal.workflow.Workflow;
import io.temporal.workflow.WorkflowInterface;
import io.temporal.workflow.WorkflowMethod;
import java.time.Duration;
import redlease.Locks;

/** A worker for the test of the file, whose address, namespace and task queue are its arguments. */
public final class Worker {
    private Worker() {}

    /** Holds a permit until it is told to go on, and ends as it is asked to. */
    @WorkflowInterface
    public interface Hold {
        @WorkflowMethod(name = "Hold")
        long run(String endpoint, String how);

        @SignalMethod(name = "proceed")
        void proceed();
    }

    /** Asks for what it holds already, by locks of its own and with a deadline in the past, and returns the refusal. */
    @WorkflowInterface
    public interface AsksTwice {
        @WorkflowMethod(name = "AsksTwice")
        String run(String endpoint);
    }

    /** Takes so many turns, one after the other, and returns how many it had. */
    @WorkflowInterface
    public interface Turns {
        @WorkflowMethod(name = "Turns")
        int run(String endpoint, int turns);
    }

    public static final class HoldWorkflow implements Hold {
        private boolean told;

        @Override
        public long run(String endpoint, String how) {
            Locks.Options options = new Locks.Options().lease(Duration.ofSeconds(how.equals("outlive") ? 1 : 30));
            return new Locks(endpoint).withPermit("r", how.equals("outlive") ? 3 : 1, options, permit -> {
                Workflow.await(() -> told);
                if (how.equals("fail")) {
                    throw ApplicationFailure.newNonRetryableFailure("as asked", "Asked");
                }
                return permit.fence;
            });
        }

        @Override
        public void proceed() {
            told = true;
        }
    }

    public static final class AsksTwiceWorkflow implements AsksTwice {
        @Override
        public String run(String endpoint) {
            Locks.Options late = new Locks.Options().timeout(Duration.ofSeconds(-20));
            return new Locks(endpoint).withPermit("r", 1, permit -> {
                try {
                    new Locks(endpoint).acquire("r", 1, late);
                    return "";
                } catch (TemporalFailure failure) {
                    return Locks.refusal(failure);
                }
            });
        }
    }

    public static final class TurnsWorkflow implements Turns {
        @Override
        public int run(String endpoint, int turns) {
            Locks locks = new Locks(endpoint);
            int had = 0;
            while (had < turns) {
                had += locks.withPermit("r", 1, permit -> 1);
            }
            return had;
        }
    }

    public static void main(String[] words) {
        WorkflowServiceStubs service = WorkflowServiceStubs.newServiceStubs(
                WorkflowServiceStubsOptions.newBuilder().setTarget(words[0]).build());
        WorkflowClient client = WorkflowClient.newInstance(
                service, WorkflowClientOptions.newBuilder().setNamespace(words[1]).build());
        WorkerFactory factory = WorkerFactory.newInstance(client);
        factory.newWorker(words[2]).registerWorkflowImplementationTypes(
                HoldWorkflow.class, AsksTwiceWorkflow.class, TurnsWorkflow.class);
        factory.start();
    }
}
