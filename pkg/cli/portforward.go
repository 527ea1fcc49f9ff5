package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/spf13/cobra"

	"github.com/gpuaas/gpuaas/pkg/client"
	"github.com/gpuaas/gpuaas/pkg/duplex"
)

// maxForwarded bounds the connections that are open at once; more wait in the queue of the local port.
const maxForwarded = 16

// portForwardCommand makes a port of an app a port of this machine.
func (a *app) portForwardCommand() *cobra.Command {
	f := forwarding{}
	c := a.projectAction("port-forward INSTANCE [LOCAL:]PORT_NAME", "Reach a port of an app from this machine, until "+
		"interrupted", cobra.ExactArgs(2), func(ctx context.Context, s *session, project string, args []string) error {
		local, name, err := localPort(args[1])
		if err != nil {
			return err
		}
		id, err := s.instanceID(ctx, project, args[0])
		if err != nil {
			return err
		}
		i, err := s.connectable(ctx, project, id)
		if err != nil {
			return err
		}
		url, err := endpointURL(i, name)
		if err != nil {
			return err
		}
		f.session, f.project, f.id, f.to.Port = s, project, id, name
		return f.run(ctx, local, url)
	})
	c.Flags().StringVar(&f.address, "address", "127.0.0.1", "address of this machine to listen on")
	c.Flags().StringVar(&f.to.MemberID, "member", "", "member of the app instance (default: the first)")
	return c
}

// connectable reads an instance of the project, or, as far as that shows it, one that the project is attached to.
func (s *session) connectable(ctx context.Context, project, id string) (client.AppInstance, error) {
	i, err := client.Read[client.AppInstance](s.hub.GetAppInstance(ctx, project, id, s.editors()...))
	if p, is := errors.AsType[*client.Problem](err); !is || p.Status != http.StatusNotFound {
		return i, err
	}
	shared, denied := client.Read[client.AttachmentList](s.hub.ListAppInstanceAttachments(ctx, project, id, nil,
		s.editors()...))
	if denied != nil || len(shared.Items) == 0 {
		return i, err
	}
	a := shared.Items[0]
	return client.AppInstance{ID: id, Status: a.Status, Endpoints: a.Endpoints}, nil
}

// localPort splits [LOCAL:]PORT_NAME; without LOCAL the system chooses a free port.
func localPort(text string) (local int, name string, err error) {
	port, name, ok := strings.Cut(text, ":")
	if !ok {
		return 0, text, nil
	}
	local, err = strconv.Atoi(port)
	if err != nil || local < 0 || local > 65535 || name == "" {
		return 0, "", usage(fmt.Errorf("%q is not [LOCAL:]PORT_NAME, like 8080:http", text))
	}
	return local, name, nil
}

func endpointURL(i client.AppInstance, name string) (string, error) {
	at := slices.IndexFunc(i.Endpoints, func(e client.Endpoint) bool { return e.Name == name })
	if at >= 0 {
		return i.Endpoints[at].URL, nil
	}
	names := make([]string, len(i.Endpoints))
	for n, e := range i.Endpoints {
		names[n] = e.Name
	}
	detail := fmt.Sprintf("The app instance is %s and publishes no port %q", statusOf(i), name)
	if len(names) > 0 {
		detail += "; it has " + strings.Join(names, ", ")
	}
	return "", &client.Problem{Status: http.StatusConflict, Code: "port_unknown", Detail: detail + "."}
}

// forwarding is one local port that leads to a port of an app.
type forwarding struct {
	*session

	project, id, address string
	to                   client.AppInstancePortForward
}

// run takes connections until ctx ends, or until the hub says that the caller may not have one.
func (f forwarding) run(ctx context.Context, local int, url string) error {
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", net.JoinHostPort(f.address, strconv.Itoa(local)))
	if err != nil {
		return usage(fmt.Errorf("cannot listen: %w", err))
	}
	interrupted := ctx.Err
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(ctx, func() { _ = listener.Close() })
	var open sync.WaitGroup
	defer func() {
		cancel(nil)
		open.Wait()
		stop()
		_ = listener.Close()
	}()
	f.progress.stop()
	scheme, _, _ := strings.Cut(url, "://")
	fmt.Fprintf(f.env.Stdout, "Forwarding %s://%s to port %s; end with Ctrl-C\n", scheme, listener.Addr(), f.to.Port)
	places := make(chan struct{}, maxForwarded)
	for {
		select {
		case places <- struct{}{}:
		case <-ctx.Done():
			return cmp.Or(interrupted(), context.Cause(ctx))
		}
		conn, err := listener.Accept()
		if err != nil {
			return cmp.Or(interrupted(), context.Cause(ctx), err)
		}
		open.Go(func() {
			defer func() { <-places }()
			if err := f.forward(ctx, conn.(*net.TCPConn)); err != nil { //nolint:forcetypeassert // tcp makes nothing else
				cancel(err)
			}
		})
	}
}

// forward joins a connection with a stream to the app. It fails where no later connection could succeed.
func (f forwarding) forward(ctx context.Context, conn *net.TCPConn) error {
	caller := duplex.TCP(conn)
	stream, err := f.hub.ForwardPort(ctx, f.project, f.id, f.to, f.editors()...)
	if err != nil {
		caller.Abort()
		switch exitCode(err) {
		case exitConflict, exitUnavailable, exitInterrupted, exitFailed:
			fmt.Fprintln(f.env.Stderr, "gpuaas: connection refused: "+printableLines(describe(err)))
			return nil
		default:
			return err
		}
	}
	if _, _, err := duplex.Join(ctx, caller, stream); err != nil && ctx.Err() == nil {
		fmt.Fprintln(f.env.Stderr, "gpuaas: connection ended early: "+err.Error())
	}
	return nil
}
