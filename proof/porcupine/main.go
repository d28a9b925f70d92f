// Porcupine judges recorded histories: is each explained by a lock, or a semaphore, that does one thing at a time?
//
// It reads operations as JSON lines from its input, in any order, and writes one JSON line for each history.
// Times are in ns of one clock. An operation without a return was made by a process that died before it had the answer.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"sort"
	"sync"
	"time"

	"github.com/anishathalye/porcupine"
)

// Patience is how long one history may take; it is "Unknown" then.
const Patience = 20 * time.Second

// Operation is one line of the input.
type Operation struct {
	History  string `json:"history"`
	Capacity int    `json:"capacity"`
	Client   int    `json:"client"`
	Op       string `json:"op"` // acquire (granted), check (it was held), release, expire
	Ticket   string `json:"ticket"`
	Fence    int64  `json:"fence"` // 0: the library has none
	Weight   int    `json:"weight"`
	Until    int64  `json:"until"` // the lease lasts at least until then, as far as the client knows
	Call     int64  `json:"call"`
	Return   *int64 `json:"return"`
}

// Held is a permit, and State what the lock or semaphore knows: who holds it, by ticket, and the last fence.
type Held struct {
	ticket string
	fence  int64
	weight int
}
type State struct {
	held []Held
	last int64
}

func (s State) find(op Operation) int {
	for i, h := range s.held {
		if h.ticket == op.Ticket && h.fence == op.Fence {
			return i
		}
	}
	return -1
}

func (s State) without(i int) State {
	if i < 0 {
		return s
	}
	held := append([]Held{}, s.held[:i]...)
	return State{append(held, s.held[i+1:]...), s.last}
}

func (s State) with(op Operation) State {
	held := append(append([]Held{}, s.held...), Held{op.Ticket, op.Fence, op.Weight})
	sort.Slice(held, func(i, j int) bool { return held[i].ticket < held[j].ticket })
	return State{held, max(s.last, op.Fence)}
}

func (s State) used() int {
	sum := 0
	for _, h := range s.held {
		sum += h.weight
	}
	return sum
}

func equal(a, b any) bool {
	s, t := a.(State), b.(State)
	if s.last != t.last || len(s.held) != len(t.held) {
		return false
	}
	for i := range s.held {
		if s.held[i] != t.held[i] {
			return false
		}
	}
	return true
}

// Step is the specification. A grant needs free capacity and a fence above all before; what is checked or released is
// held. A permit ends by itself at any time from the end of its lease on. A release whose caller died may come at any
// time, or never: after the end of the history.
func step(state, input, _ any) (bool, any) {
	s, op := state.(State), input.(Operation)
	i := s.find(op)
	switch op.Op {
	case "acquire":
		free := i < 0 && s.used()+op.Weight <= op.Capacity
		return free && (op.Fence == 0 || op.Fence > s.last), s.with(op)
	case "check":
		return i >= 0, s
	case "release":
		return i >= 0 || op.Return == nil, s.without(i)
	default: // expire
		return true, s.without(i)
	}
}

// Judge adds what ended by itself, and looks for an order of all operations that the specification allows.
func judge(operations []Operation) porcupine.CheckResult {
	type permit struct {
		ticket string
		fence  int64
	}
	grants, until, released := map[permit]Operation{}, map[permit]int64{}, map[permit]bool{}
	for _, op := range operations {
		key := permit{op.Ticket, op.Fence}
		until[key] = max(until[key], op.Until)
		if op.Op == "acquire" {
			grants[key] = op
		}
		if op.Op == "release" && op.Return != nil {
			released[key] = true
		}
	}
	for key, op := range grants {
		if !released[key] {
			op.Op, op.Call, op.Return = "expire", max(until[key], op.Call), nil
			operations = append(operations, op)
		}
	}
	var all []porcupine.Operation
	for i, op := range operations {
		end := int64(math.MaxInt64)
		if op.Return != nil {
			end = *op.Return
		}
		all = append(all, porcupine.Operation{ClientId: i, Input: op, Call: op.Call, Return: end})
	}
	model := porcupine.Model{Init: func() any { return State{} }, Step: step, Equal: equal}
	return porcupine.CheckOperationsTimeout(model, all, Patience)
}

func main() {
	histories := map[string][]Operation{}
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var op Operation
		if err := json.Unmarshal(lines.Bytes(), &op); err != nil {
			fmt.Fprintf(os.Stderr, "not an operation: %s: %v\n", lines.Text(), err)
			os.Exit(2)
		}
		histories[op.History] = append(histories[op.History], op)
	}
	names := make(chan string, len(histories))
	for name := range histories {
		names <- name
	}
	close(names)
	var all sync.WaitGroup
	var output sync.Mutex
	for range 2 {
		all.Go(func() {
			for name := range names {
				began := time.Now()
				verdict := judge(histories[name])
				output.Lock()
				line, _ := json.Marshal(map[string]any{"history": name, "verdict": verdict,
					"operations": len(histories[name]), "seconds": time.Since(began).Seconds()})
				fmt.Println(string(line))
				output.Unlock()
			}
		})
	}
	all.Wait()
}
