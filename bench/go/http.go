// HTTP under wrk, a program of its own: it asks, and tells how it went.
package main

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

const (
	hello        = "hello"
	httpThreads  = 2 // of wrk
	httpHogs     = 2
	httpWarmUpMs = 1_000
	httpMs       = 2_000
)

func httpHello(a args, connections int) report {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(err)
	said := []byte(hello)
	if n := a.number("body", 0); n > 0 {
		said = bytes.Repeat([]byte("x"), n)
	}
	length := strconv.Itoa(len(said))
	go http.Serve(listener, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if len(said) > len(hello) {
			w.Header().Set("Content-Length", length) // else a long body comes in chunks
		}
		w.Write(said)
	}))
	url := "http://" + listener.Addr().String() + "/"
	answer, err := http.Get(url)
	must(err)
	body, err := io.ReadAll(answer.Body)
	must(err)
	answer.Body.Close()
	check(answer.StatusCode == http.StatusOK && bytes.Equal(body, said))

	wrk(url, connections, httpWarmUpMs)
	start, cpu := time.Now(), cpuTime()
	r := wrk(url, connections, a.number("ms", httpMs))
	r["cores"] = (cpuTime() - cpu).Seconds() / time.Since(start).Seconds()
	return r
}

func httpHelloHogs(a args, connections int) report {
	var stop atomic.Bool
	var results [httpHogs]uint64 // for the compiler: the work is needed
	var wg sync.WaitGroup
	for h := range httpHogs {
		wg.Go(func() {
			x := uint64(h)
			for !stop.Load() {
				x = chunk(x)
			}
			results[h] = x
		})
	}
	r := httpHello(a, connections)
	stop.Store(true)
	wg.Wait()
	return r
}

// wrk counts in whole seconds.
func wrk(url string, connections, ms int) report {
	said, err := exec.Command("wrk", "--latency", fmt.Sprintf("-t%d", httpThreads),
		fmt.Sprintf("-c%d", connections), fmt.Sprintf("-d%d", max(ms/1_000, 1)), url).Output()
	must(err)
	r := report{}
	for line := range strings.Lines(string(said)) {
		switch label, rest, _ := strings.Cut(strings.TrimSpace(line), " "); label {
		case "Requests/sec:":
			r["per_s"], err = strconv.ParseFloat(strings.TrimSpace(rest), 64)
			must(err)
		case "50%":
			r["p50_us"] = micros(rest)
		case "99%":
			r["p99_us"] = micros(rest)
		case "Socket", "Non-2xx": // errors
			fail(string(said))
		}
	}
	return r
}

// micros reads 1.23ms and the like.
func micros(text string) float64 {
	d, err := time.ParseDuration(strings.TrimSpace(text))
	must(err)
	return d.Seconds() * 1e6
}
