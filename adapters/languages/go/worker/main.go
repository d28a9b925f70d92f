// A worker for the test of the package, whose address, namespace, task queue and endpoint are its arguments.
package main

import (
	"os"
	"time"

	"go.temporal.io/sdk/client"
	"go.temporal.io/sdk/temporal"
	"go.temporal.io/sdk/worker"
	"go.temporal.io/sdk/workflow"

	"redlease"
)

// Hold holds a permit until it is told to go on, and ends as it is asked to.
func Hold(ctx workflow.Context, endpoint, how string) (int64, error) {
	fence := int64(0)
	if how == "successor" {
		return fence, nil
	}
	capacity, options := 1, redlease.Options{}
	if how == "outlive" {
		capacity, options.Lease = 3, time.Second
	}
	err := redlease.New(endpoint).WithPermit(ctx, "r", capacity, func(ctx workflow.Context, permit redlease.Permit) error {
		fence = permit.Fence
		selector := workflow.NewSelector(ctx)
		selector.AddReceive(workflow.GetSignalChannel(ctx, "proceed"), func(channel workflow.ReceiveChannel, _ bool) {
			channel.Receive(ctx, nil)
		})
		selector.AddReceive(ctx.Done(), func(workflow.ReceiveChannel, bool) {})
		selector.Select(ctx)
		if how == "fail" {
			return temporal.NewNonRetryableApplicationError("as asked", "Asked", nil)
		}
		if how == "continue" {
			return workflow.NewContinueAsNewError(ctx, Hold, endpoint, "successor")
		}
		return ctx.Err()
	}, options)
	return fence, err
}

// AsksTwice asks for what it holds already, with a deadline in the past, and returns the refusal.
func AsksTwice(ctx workflow.Context, endpoint string) (string, error) {
	locks, refusal := redlease.New(endpoint), ""
	err := locks.WithPermit(ctx, "r", 1, func(ctx workflow.Context, _ redlease.Permit) error {
		_, refused := locks.Acquire(ctx, "r", 1, redlease.Options{Timeout: -time.Second})
		refusal = redlease.Refusal(refused)
		return nil
	})
	return refusal, err
}

// Turns takes so many turns, one after the other, and returns how many it had.
func Turns(ctx workflow.Context, endpoint string, turns int) (int, error) {
	locks, had := redlease.New(endpoint), 0
	for had < turns {
		err := locks.WithPermit(ctx, "r", 1, func(workflow.Context, redlease.Permit) error { return nil })
		if err != nil {
			return had, err
		}
		had++
	}
	return had, nil
}

func main() {
	address, namespace, queue := os.Args[1], os.Args[2], os.Args[3]
	connected, err := client.Dial(client.Options{HostPort: address, Namespace: namespace})
	if err != nil {
		panic(err)
	}
	serving := worker.New(connected, queue, worker.Options{})
	serving.RegisterWorkflow(Hold)
	serving.RegisterWorkflow(AsksTwice)
	serving.RegisterWorkflow(Turns)
	if err := serving.Run(worker.InterruptCh()); err != nil {
		panic(err)
	}
}
