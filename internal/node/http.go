package node

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/pprof"
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// openHTTP opens the port for operators' machines: metrics, health, profiles.
func (n *Node) openHTTP(ctx context.Context) error {
	bind := netip.AddrPortFrom(n.config.Telemetry.Bind, uint16(n.config.Ports.HTTP))
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", bind.String())
	if err != nil {
		return errPort("http", "ports.http", bind, err)
	}
	if n.addresses.HTTP, err = n.advertised(l.Addr()); err != nil {
		return errors.Join(err, l.Close())
	}
	if ip := n.config.Telemetry.Bind; !ip.IsUnspecified() { // it may be bound elsewhere than the others
		n.addresses.HTTP = netip.AddrPortFrom(ip, n.addresses.HTTP.Port())
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(n.metrics.registry, promhttp.HandlerOpts{MaxRequestsInFlight: 4}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "alive") })
	mux.HandleFunc("GET /readyz", n.readyz)
	if n.config.Telemetry.Bind.IsLoopback() { // profiles show memory
		mux.HandleFunc("GET /debug/pprof/", pprof.Index)
		mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
		mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
		mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	}
	s := &http.Server{
		Handler: mux, MaxHeaderBytes: 16 << 10,
		ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second, IdleTimeout: time.Minute,
		WriteTimeout: 2 * time.Minute, // a profile takes as long as it was asked to
	}
	var work sync.WaitGroup
	n.begin = append(n.begin, func() {
		work.Go(func() {
			if err := s.Serve(bounded(l, maxHTTPConns)); !errors.Is(err, http.ErrServerClosed) {
				n.log.Error("http ended", "err", err)
			}
		})
	})
	n.closers = append(n.closers, func() error {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		if err := s.Shutdown(ctx); err != nil {
			_ = s.Close() // whoever still reads is cut
		}
		_ = l.Close() // it was never served, if the start failed
		work.Wait()
		return nil
	})
	return nil
}

func (n *Node) readyz(w http.ResponseWriter, _ *http.Request) {
	if why := n.notReady(); len(why) > 0 {
		http.Error(w, strings.Join(why, "\n"), http.StatusServiceUnavailable)
		return
	}
	fmt.Fprintln(w, "ready")
}

// notReady says why no work should be sent here.
func (n *Node) notReady() []string {
	var why []string
	switch {
	case n.ctx.Err() != nil:
		why = append(why, "closed: "+context.Cause(n.ctx).Error())
	case n.isDraining():
		why = append(why, "draining")
	}
	if !n.joined.Load() {
		reason := "not joined"
		if err := n.cluster.NotJoined(); err != nil {
			reason += ": " + err.Error()
		}
		why = append(why, reason)
	}
	if age := time.Since(time.Unix(0, n.swept.Load())); age > maxSweepAge {
		why = append(why, fmt.Sprintf("the sweeper has not run for %v", age.Round(time.Second)))
	}
	return why
}
