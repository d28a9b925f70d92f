// A worker in Go without a Redis: its workflows call the vendor under a permit of the lock service.
package main

import (
	"os"
	"time"

	"go.temporal.io/sdk/client"
	"go.temporal.io/sdk/worker"
	"go.temporal.io/sdk/workflow"

	"redlease"
)

// Called is when a call began and ended, in ms, and under which fence it was made.
type Called struct {
	BeganMs, EndedMs, Fence int64
}

// CallVendor calls the vendor, which takes a while.
func CallVendor(fence int64, takes time.Duration) (Called, error) {
	began := time.Now()
	time.Sleep(takes)
	return Called{began.UnixMilli(), time.Now().UnixMilli(), fence}, nil
}

// Order calls the vendor once.
func Order(ctx workflow.Context, endpoint, resource string, capacity int, takes time.Duration) (called Called, err error) {
	err = redlease.New(endpoint).WithPermit(ctx, resource, capacity, func(ctx workflow.Context, permit redlease.Permit) error {
		ctx = workflow.WithActivityOptions(ctx, workflow.ActivityOptions{StartToCloseTimeout: time.Minute})
		return workflow.ExecuteActivity(ctx, CallVendor, permit.Fence, takes).Get(ctx, &called)
	})
	return called, err
}

// The server's address and the task queue are its arguments.
func main() {
	connected, err := client.Dial(client.Options{HostPort: os.Args[1]})
	if err != nil {
		panic(err)
	}
	serving := worker.New(connected, os.Args[2], worker.Options{})
	serving.RegisterWorkflow(Order)
	serving.RegisterActivity(CallVendor)
	if err := serving.Run(worker.InterruptCh()); err != nil {
		panic(err)
	}
}
