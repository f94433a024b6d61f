// The network: an echo on loopback, clients and server in this process.
package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

const (
	echoBytes  = 64
	echoWarmUp = 300 * time.Millisecond
	echoMs     = 2_000
	connsIdle  = 5_000

	pairsTrips  = 128_000 // of a round, all clients together
	pairsBuffer = 4_096

	connsMostlyIdle = 10_000
	mostlyIdleMs    = 6_000
)

// Phases of an echo.
const (
	warming = iota
	measuring
	ending
)

// echoServer accepts and echoes for ever.
func echoServer() net.Addr {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(err)
	go func() {
		for {
			conn, err := listener.Accept()
			must(err)
			go func() {
				var buf [echoBytes]byte
				for {
					if _, err := io.ReadFull(conn, buf[:]); err != nil {
						conn.Close()
						return
					}
					_, err := conn.Write(buf[:])
					must(err)
				}
			}()
		}
	}()
	return listener.Addr()
}

func echo(a args, clients int) report {
	addr := echoServer().String()
	var phase atomic.Int32
	took := make(chan []time.Duration, clients)
	for range clients {
		go func() {
			conn, err := net.Dial("tcp", addr)
			must(err)
			var buf [echoBytes]byte
			var mine []time.Duration
			for {
				now := phase.Load()
				if now == ending {
					break
				}
				start := time.Now()
				_, err := conn.Write(buf[:])
				must(err)
				_, err = io.ReadFull(conn, buf[:])
				must(err)
				if now == measuring {
					mine = append(mine, time.Since(start))
				}
			}
			conn.Close()
			took <- mine
		}()
	}
	time.Sleep(echoWarmUp)
	phase.Store(measuring)
	start, cpu := time.Now(), cpuTime()
	time.Sleep(time.Duration(a.number("ms", echoMs)) * time.Millisecond)
	phase.Store(ending)
	wall, used := time.Since(start).Seconds(), cpuTime()-cpu
	var all []time.Duration
	for range clients {
		all = append(all, <-took...)
	}
	r := report{"per_s": float64(len(all)) / wall, "cores": used.Seconds() / wall}
	return lateness(r, all)
}

// echoPairs has pairs that make their round trips; then the next round begins.
func echoPairs(a args, pairs int) report {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(err)
	conns := make([]net.Conn, pairs)
	for i := range conns {
		conns[i], err = net.Dial("tcp", listener.Addr().String())
		must(err)
		served, err := listener.Accept()
		must(err)
		go servePair(served)
	}
	trips := pairsTrips / pairs
	m := newMeter(a, trips*pairs)
	var wg sync.WaitGroup
	for m.anotherRound() {
		for _, conn := range conns {
			wg.Go(func() { askPair(conn, trips) })
		}
		wg.Wait()
	}
	return m.report()
}

func servePair(conn net.Conn) {
	buf := make([]byte, pairsBuffer)
	for {
		n, err := conn.Read(buf)
		if err != nil {
			return
		}
		_, err = conn.Write(buf[:n])
		must(err)
	}
}

func askPair(conn net.Conn, trips int) {
	message := bytes.Repeat([]byte{1}, echoBytes)
	answer := make([]byte, echoBytes)
	for range trips {
		_, err := conn.Write(message)
		must(err)
		clear(answer)
		_, err = io.ReadFull(conn, answer)
		must(err)
		check(bytes.Equal(message, answer))
	}
}

// mostlyIdle has connections of which few speak. The client is a program of its own, the same as
// for the other runtimes: common/src/conns.rs.
func mostlyIdle(a args) report {
	program := os.Getenv("BENCH_CLIENT")
	if program == "" {
		fail("BENCH_CLIENT must name the client's program: any worker in Rust")
	}
	client := exec.Command(program, "conns_client",
		fmt.Sprintf("port=%d", echoServer().(*net.TCPAddr).Port),
		fmt.Sprintf("n=%d", a.number("n", connsMostlyIdle)),
		fmt.Sprintf("ms=%d", a.number("ms", mostlyIdleMs)))
	client.Stderr = os.Stderr
	input, err := client.StdinPipe()
	must(err)
	output, err := client.StdoutPipe()
	must(err)
	must(client.Start())
	lines := bufio.NewScanner(output)
	check(lines.Scan() && lines.Text() == "ready")
	time.Sleep(settle)
	share := newCPUShare()
	_, err = io.WriteString(input, "begin\n")
	must(err)
	check(lines.Scan())
	r := share.report()
	must(json.Unmarshal(lines.Bytes(), &r))
	must(client.Wait())
	return r
}

// idleConns has connections that wait for their clients: plain sockets, each used once.
func idleConns(a args) report {
	n := a.number("n", connsIdle)
	rssBefore, pteBefore := memory()
	addr := &syscall.SockaddrInet4{Port: echoServer().(*net.TCPAddr).Port, Addr: [4]byte{127, 0, 0, 1}}
	var buf [echoBytes]byte
	for range n {
		fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
		must(err)
		must(syscall.Connect(fd, addr))
		buf[0] = 1
		_, err = syscall.Write(fd, buf[:])
		must(err)
		buf[0] = 0
		_, err = syscall.Read(fd, buf[:])
		must(err)
		check(buf[0] == 1)
	}
	time.Sleep(settle)
	rss, pte := memory()
	return report{
		"rss_bytes": (rss - rssBefore) / float64(n),
		"pte_bytes": (pte - pteBefore) / float64(n),
	}
}

func must(err error) {
	if err != nil {
		fail(err.Error())
	}
}
