// Serves miniredis, the Redis for tests of Go programs, on a port of loopback until it is ended.
package main

import (
	"log"
	"os"
	"time"

	"github.com/alicebob/miniredis/v2"
)

// Keys expire only as a test in Go says; the tests are other processes, for which time passes by itself.
const tick = 5 * time.Millisecond

func main() {
	server := miniredis.NewMiniRedis()
	if err := server.StartAddr("127.0.0.1:" + os.Args[1]); err != nil {
		log.Fatal(err)
	}
	last := time.Now()
	for now := range time.Tick(tick) {
		server.FastForward(now.Sub(last))
		last = now
	}
}
