// A worker for the test of the file, whose address, namespace and task queue are its arguments.
import { fileURLToPath } from 'node:url';
import { NativeConnection, Worker } from '@temporalio/worker';

const [address = '', namespace = '', taskQueue = ''] = process.argv.slice(2);
const connection = await NativeConnection.connect({ address });
const workflowsPath = fileURLToPath(new URL('./workflows.js', import.meta.url));
const worker = await Worker.create({ connection, namespace, taskQueue, workflowsPath });
await worker.run();
