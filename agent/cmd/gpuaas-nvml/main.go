// Command gpuaas-nvml prints the machine's NVIDIA accelerators as one JSON document, and ends. The agent starts it for
// each scan: a driver that hangs only hangs this process. It is the one program of a node that needs cgo.
package main

import (
	"errors"
	"fmt"
	"os"
	"time"

	"google.golang.org/protobuf/encoding/protojson"

	"github.com/gpuaas/gpuaas/protocol"
)

// maxRun ends a process whose agent has ended and cannot kill it any more.
const maxRun = 2 * time.Minute

func main() {
	time.AfterFunc(maxRun, func() { os.Exit(1) })
	if err := printAccelerators(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func printAccelerators() error {
	found, err := accelerators()
	if err != nil {
		return err
	}
	out, err := protojson.Marshal(&protocol.NodeFacts{Accelerators: found})
	_, writeErr := os.Stdout.Write(out)
	return errors.Join(err, writeErr)
}
