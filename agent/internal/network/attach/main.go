// Command attach makes and removes the product's own networks for the benchmark, which compares launches with plain
// calls of containerd's client beside them. It has a bridge of its own and leaves nothing behind when its input ends.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"

	"github.com/gpuaas/gpuaas/agent/internal/network"
)

// request is one line of input: an attachment to make, with one published port, or to remove.
type request struct {
	ID            string `json:"id"`
	HostPort      uint16 `json:"host_port"`
	ContainerPort uint16 `json:"container_port"`
	Remove        bool   `json:"remove"`
}

// reply is one line of output. An attachment that is made gives three: the paths that its namespaces will have, that
// they exist, and that it is done; one that is removed gives the last.
type reply struct {
	Step       string `json:"step"`
	NetNSPath  string `json:"net_ns_path,omitempty"`
	UserNSPath string `json:"user_ns_path,omitempty"`
	Error      string `json:"error,omitempty"`
}

func main() {
	var c network.Config
	var uidBase, uidSize uint
	flag.StringVar(&c.Bridge, "bridge", "", "name of the bridge")
	flag.StringVar(&c.CIDR, "cidr", "", "addresses behind the bridge")
	flag.StringVar(&c.StateDir, "state-dir", "", "directory for what the network records")
	flag.UintVar(&uidBase, "uid-base", 0, "first host id of the user namespaces")
	flag.UintVar(&uidSize, "uid-size", 0, "number of ids of the user namespaces; 0: none are made")
	flag.Parse()
	c.UIDMapBase, c.UIDMapSize = uint32(uidBase), uint32(uidSize)
	if err := run(context.Background(), c, os.Stdin, os.Stdout); err != nil { //nolint:forbidigo // main has no caller
		fmt.Fprintln(os.Stderr, "attach:", err)
		os.Exit(1)
	}
}

// run serves requests until in ends, then removes everything.
func run(ctx context.Context, c network.Config, in io.Reader, out io.Writer) (err error) {
	nw, err := network.Open(ctx, c)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, nw.Purge(ctx)) }()
	requests, replies := json.NewDecoder(in), json.NewEncoder(out)
	for {
		var r request
		if err := requests.Decode(&r); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		done := reply{Step: "done"}
		if err := serve(ctx, nw, r, replies); err != nil {
			done.Error = err.Error()
		}
		if err := replies.Encode(done); err != nil {
			return err
		}
	}
}

func serve(ctx context.Context, nw *network.Network, r request, replies *json.Encoder) error {
	if r.Remove {
		return nw.Remove(ctx, r.ID)
	}
	paths := nw.Namespaces(r.ID)
	if err := replies.Encode(reply{
		Step: "paths", NetNSPath: paths.NetNSPath, UserNSPath: paths.UserNSPath,
	}); err != nil {
		return err
	}
	var told error
	_, err := nw.Setup(ctx, r.ID, []network.PortMapping{{
		HostPort: r.HostPort, ContainerPort: r.ContainerPort, Protocol: "tcp",
	}}, func() { told = replies.Encode(reply{Step: "namespaces"}) })
	return errors.Join(err, told)
}
