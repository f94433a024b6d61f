// The network: an echo on loopback, clients and server in this process.
package main

import (
	"io"
	"net"
	"sync/atomic"
	"syscall"
	"time"
)

const (
	echoBytes  = 64
	echoWarmUp = 300 * time.Millisecond
	echoMs     = 2_000
	connsIdle  = 5_000
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
