package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/internal/query"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

func newUsage() *cobra.Command {
	cmd := &cobra.Command{Use: "usage", Short: "Usage as nodes signed it, evidence in a dispute"}
	cmd.AddCommand(newUsageExport())
	return cmd
}

// exportedSegment is a line of `usage export`.
type exportedSegment struct {
	NodeID      string `json:"node_id"`
	Incarnation string `json:"incarnation"`
	Number      uint64 `json:"number"`
	// Envelope is base64 in JSON.
	Envelope []byte `json:"envelope"`
}

func newUsageExport() *cobra.Command {
	var (
		c                config
		node, from, to   string
		earliest, latest time.Time
	)
	cmd := &cobra.Command{
		Use:   "export --node ID",
		Short: "Write a node's signed usage segments, one JSON object a line; the hub may run",
		Long: `Writes the usage segments of a node as the node signed them, one JSON object a line: node_id,
incarnation, number and envelope, the base64 of the protobuf gpuaas.v1.Envelope, signed with the
node's key. --from and --to choose by the time at which the hub posted a segment; as segments are
kept by slots of four hours or more, those of the whole first and last slot are written.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if !db.IsID(node) {
				return fault.New(fault.Malformed, fault.CodeFlagInvalid, "--node needs the id of a node.", nil)
			}
			if earliest, err = timeFlag("from", from, time.Time{}); err != nil {
				return err
			}
			if latest, err = timeFlag("to", to, time.Now().Add(24*time.Hour)); err != nil {
				return err
			}
			if !earliest.Before(latest) {
				return fault.New(fault.Malformed, fault.CodeFlagInvalid, "--from must be before --to.", nil)
			}
			var closers closers
			defer func() { err = errors.Join(err, closers.close()) }()
			d, err := openLocalDatabase(cmd.Context(), c, closers.add)
			if err != nil {
				return err
			}
			out := bufio.NewWriter(cmd.OutOrStdout())
			lines := json.NewEncoder(out)
			export := query.ExportSegments{DB: d, Emit: func(s ledger.SignedSegment) error {
				return lines.Encode(exportedSegment{node, s.Incarnation, s.Number, s.Envelope})
			}}
			return errors.Join(export.Do(cmd.Context(), node, earliest, latest), out.Flush())
		},
	}
	c.databaseFlags(cmd)
	cmd.Flags().StringVar(&node, "node", "", "id of the node")
	cmd.Flags().StringVar(&from, "from", "", "leave out what was posted before, like 2026-11-22T10:00:00Z (default: the "+
		"oldest that is kept)")
	cmd.Flags().StringVar(&to, "to", "", "leave out what was posted at or after, like 2026-11-22T10:00:00Z (default: "+
		"the newest)")
	return cmd
}

func timeFlag(name, value string, absent time.Time) (time.Time, error) {
	if value == "" {
		return absent, nil
	}
	t, err := time.Parse(time.RFC3339, value)
	if err != nil {
		return t, fault.New(fault.Malformed, fault.CodeFlagInvalid, "--"+name+" needs a time of RFC 3339, like "+
			"2026-11-22T10:00:00Z.", err)
	}
	return t, nil
}
