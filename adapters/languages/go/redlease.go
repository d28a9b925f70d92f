// Package redlease takes the locks of a redlease lock service from Temporal workflows, by Nexus.
//
// It is one file: copy it into your module. It needs go.temporal.io/sdk v1.36 or later.
package redlease

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"go.temporal.io/sdk/temporal"
	"go.temporal.io/sdk/workflow"
)

const (
	service     = "redlease"
	answer      = 10 * time.Second // how long an operation that does not wait may take
	ticketBytes = 256              // how long a ticket may be
)

var refusals = []string{"AcquireTimeout", "QueueFull", "LeaseLost", "Withdrawn", "Superseded", "ValueError"}

// Permit is the right to use Weight units of a resource until its lease ends. Times are ms of the Redis server's clock.
type Permit struct {
	Resource    string            `json:"resource"`
	Ticket      string            `json:"ticket"`
	Fence       int64             `json:"fence"`
	Weight      int               `json:"weight"`
	Capacity    int               `json:"capacity"`
	LeaseMs     int64             `json:"lease_ms"`
	GrantedAtMs int64             `json:"granted_at_ms"`
	ExpiresAtMs int64             `json:"expires_at_ms"`
	Owner       string            `json:"owner"`
	Metadata    map[string]string `json:"metadata"`
	Key         *string           `json:"key"`
}

// Options of a request; the zero value of each is its default.
type Options struct {
	Lease   time.Duration // how long the permit stays valid without renewal: 30 s
	Timeout time.Duration // how long to wait: without limit; not at all if it is negative, as that of a deadline in the past
	Weight  int           // units to hold: 1
	MaxHold time.Duration // after this it is no longer renewed: never
	Key     string        // requests of different keys take turns: none
	Share   float64       // how large a share of the turns the key gets: 1
}

// Locks are those of one service, for one workflow run.
type Locks struct {
	endpoint string
	asked    int
}

type acquire struct {
	Resource  string  `json:"resource"`
	Capacity  int     `json:"capacity"`
	Ticket    string  `json:"ticket"`
	Weight    int     `json:"weight"`
	LeaseMs   int64   `json:"lease_ms"`
	TimeoutMs *int64  `json:"timeout_ms"`
	MaxHoldMs *int64  `json:"max_hold_ms"`
	Key       string  `json:"key"`
	Share     float64 `json:"share"`
}

type release struct {
	Resource string `json:"resource"`
	Ticket   string `json:"ticket"`
	Fence    *int64 `json:"fence"`
}

type released struct {
	Released bool `json:"released"`
}

// New returns the locks of the service behind a Nexus endpoint. Call it once in a run, and hand the result on: it counts
// the run's requests, and a second one would give its first request the name, and so the permit, of the first one's.
func New(endpoint string) *Locks {
	return &Locks{endpoint: endpoint}
}

// WithPermit runs the body under a permit, and releases it in every ending: an error, a cancellation and
// continue-as-new too. A closed run that did not come to that has its permit released by the service. Of a panic Temporal
// executes the workflow task again, under the same permit.
func (locks *Locks) WithPermit(
	ctx workflow.Context, resource string, capacity int, body func(workflow.Context, Permit) error, options ...Options,
) error {
	permit, err := locks.Acquire(ctx, resource, capacity, options...)
	if err != nil {
		return err
	}
	err = body(ctx, permit)
	_, _ = locks.Release(ctx, permit) // without an answer, the service releases it when this run has closed
	return err
}

// Acquire waits for a permit, which the service renews while this run is open. Its error has a Refusal, is that of a
// cancellation, or says that the service did not answer; the request is then out of the queue.
func (locks *Locks) Acquire(ctx workflow.Context, resource string, capacity int, options ...Options) (Permit, error) {
	wanted := Options{Lease: 30 * time.Second, Weight: 1, Share: 1}
	for _, given := range options {
		wanted = given.or(wanted)
	}
	locks.asked++
	info := workflow.GetInfo(ctx)
	// The same in every replay and after a reset: the new run finds what the old one had.
	ticket := fmt.Sprintf("%s/%d", info.OriginalRunID, locks.asked)
	if full := fmt.Sprintf("%s/%s/%s", info.Namespace, info.WorkflowExecution.ID, ticket); len(full) <= ticketBytes {
		ticket = full
	}
	call := acquire{
		Resource: resource, Capacity: capacity, Ticket: ticket, Weight: wanted.Weight,
		LeaseMs: wanted.Lease.Milliseconds(), TimeoutMs: ms(wanted.Timeout), MaxHoldMs: ms(wanted.MaxHold),
		Key: wanted.Key, Share: wanted.Share,
	}
	limit := time.Duration(0)
	if wanted.Timeout != 0 {
		limit = max(wanted.Timeout, 0) + answer
	}
	var permit Permit
	err := locks.call(ctx, "acquire", call, limit, &permit)
	if err == nil && ctx.Err() != nil {
		err = ctx.Err() // the grant came before the cancellation
	}
	if err != nil && Refusal(err) == "" {
		locks.end(ctx, release{Resource: resource, Ticket: ticket}, wanted.Lease)
	}
	return permit, err
}

// Release gives a permit back, also after a cancellation; it tells whether it was still held.
func (locks *Locks) Release(ctx workflow.Context, permit Permit) (bool, error) {
	call := release{Resource: permit.Resource, Ticket: permit.Ticket, Fence: &permit.Fence}
	return locks.end(ctx, call, time.Duration(permit.LeaseMs)*time.Millisecond)
}

// Check asks whether a permit is held now.
func (locks *Locks) Check(ctx workflow.Context, permit Permit) (bool, error) {
	var checked struct {
		Held bool `json:"held"`
	}
	call := release{Resource: permit.Resource, Ticket: permit.Ticket, Fence: &permit.Fence}
	err := locks.call(ctx, "check", call, answer, &checked)
	return checked.Held, err
}

// Adopt takes over a permit from the run that this one continues as new, which did not release it.
func (locks *Locks) Adopt(ctx workflow.Context, permit Permit) (Permit, error) {
	var adopted Permit
	call := struct {
		Permit Permit `json:"permit"`
	}{permit}
	err := locks.call(ctx, "adopt", call, answer, &adopted)
	return adopted, err
}

// Refusal is the name of the service's error: AcquireTimeout, QueueFull, LeaseLost, Withdrawn, Superseded or ValueError; "" of
// another error.
func Refusal(err error) string {
	var failure *temporal.ApplicationError
	for errors.As(err, &failure) {
		if slices.Contains(refusals, failure.Type()) {
			return failure.Type()
		}
		err = errors.Unwrap(failure)
	}
	return ""
}

func (locks *Locks) end(ctx workflow.Context, call release, lease time.Duration) (bool, error) {
	detached, cancel := workflow.NewDisconnectedContext(ctx)
	defer cancel()
	var done released
	err := locks.call(detached, "release", call, lease+answer, &done)
	return done.Released, err
}

// A cancellation is passed on here, unless the operation has completed. The SDK would cancel an operation that completed
// in the same workflow task as well: the server refuses that, and the SDK asks again for ever.
func (locks *Locks) call(ctx workflow.Context, operation string, input any, limit time.Duration, result any) error {
	detached, cancel := workflow.NewDisconnectedContext(ctx)
	defer cancel()
	options := workflow.NexusOperationOptions{ScheduleToCloseTimeout: limit}
	called := workflow.NewNexusClient(locks.endpoint, service).ExecuteOperation(detached, operation, input, options)
	workflow.NewSelector(ctx).
		AddFuture(called, func(workflow.Future) {}).
		AddReceive(ctx.Done(), func(workflow.ReceiveChannel, bool) { cancel() }).
		Select(ctx)
	return called.Get(detached, result)
}

func (given Options) or(usual Options) Options {
	if given.Lease == 0 {
		given.Lease = usual.Lease
	}
	if given.Weight == 0 {
		given.Weight = usual.Weight
	}
	if given.Share == 0 {
		given.Share = usual.Share
	}
	return given
}

func ms(duration time.Duration) *int64 {
	if duration == 0 {
		return nil
	}
	value := max(duration.Milliseconds(), 0)
	return &value
}
