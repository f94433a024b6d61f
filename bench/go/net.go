// The network: an echo on loopback, clients and server in this process.
package main

import (
	"io"
	"net"
	"sync/atomic"
	"time"
)

const (
	echoBytes  = 64
	echoWarmUp = 300 * time.Millisecond
	echoMs     = 2_000
)

// Phases of an echo.
const (
	warming = iota
	measuring
	ending
)

func echo(a args, clients int) report {
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

	var phase atomic.Int32
	took := make(chan []time.Duration, clients)
	for range clients {
		go func() {
			conn, err := net.Dial("tcp", listener.Addr().String())
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

func must(err error) {
	if err != nil {
		fail(err.Error())
	}
}
