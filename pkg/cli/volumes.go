package cli

import (
	"context"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpuaas/gpuaas/pkg/client"
	"github.com/gpuaas/gpuaas/pkg/loop"
)

const (
	// volumeWait is how long one request waits for a change.
	volumeWait = "30s"
	// volumePoll is the least time between two answers without a change: a hub with too many watchers answers at once.
	volumePoll = time.Second
)

func volumeColumns() []column[client.Volume] {
	return []column[client.Volume]{
		{"NAME", func(v client.Volume) string { return v.Name }},
		{"STATUS", func(v client.Volume) string { return string(v.Status) }},
		{"REASON", func(v client.Volume) string { return v.StatusReason }},
		{"SIZE MIB", func(v client.Volume) string { return strconv.FormatInt(v.SizeMib, 10) }},
		{"IN USE", func(v client.Volume) string { return strconv.FormatBool(len(v.UsedByMemberIds) > 0) }},
		{"NODE", func(v client.Volume) string { return v.NodeID }},
		{"ID", func(v client.Volume) string { return v.ID }},
	}
}

func snapshotColumns() []column[client.VolumeSnapshot] {
	return []column[client.VolumeSnapshot]{
		{"ID", func(v client.VolumeSnapshot) string { return v.ID }},
		{"STATUS", func(v client.VolumeSnapshot) string { return string(v.Status) }},
		{"SIZE MIB", func(v client.VolumeSnapshot) string { return strconv.FormatInt(v.SizeMib, 10) }},
		{"CREATED", func(v client.VolumeSnapshot) string { return stamp(v.CreatedAt) }},
		{"DESCRIPTION", func(v client.VolumeSnapshot) string { return v.Description }},
	}
}

func (a *app) volumesCommand() *cobra.Command {
	var only string
	list := projectListing(a, "list", "Volumes of the project", cobra.NoArgs, volumeColumns(),
		func(ctx context.Context, s *session, project string, _ []string, cursor string) (*http.Response, error) {
			return s.hub.ListVolumes(ctx, project, &client.ListVolumesParams{
				Cursor: cursor, Limit: client.PageSize, Status: client.VolumeStatus(only),
			}, s.editors()...)
		})
	list.Flags().StringVar(&only, "status", "", "only those with this status; deleted ones are listed only then")
	snapshots := projectListing(a, "snapshots VOLUME", "Snapshots of a volume", cobra.ExactArgs(1), snapshotColumns(),
		func(ctx context.Context, s *session, project string, args []string, _ string) (*http.Response, error) {
			id, err := s.volumeID(ctx, project, args[0])
			if err != nil {
				return nil, err
			}
			return s.hub.ListVolumeSnapshots(ctx, project, id, s.editors()...)
		})
	return group("volumes", "Volumes of the project, which outlive app instances", list, a.createVolume(), snapshots,
		a.volumeAction("get VOLUME", "One volume", "", cobra.ExactArgs(1), func(ctx context.Context, s *session, project,
			id string, _ []string,
		) (*http.Response, error) {
			return s.hub.GetVolume(ctx, project, id, nil, s.editors()...)
		}),
		a.volumeAction("restore VOLUME SNAPSHOT_ID", "Replace the content of a volume by a snapshot; what it holds now is "+
			"lost", client.VolumeStatusReady, cobra.ExactArgs(2), func(ctx context.Context, s *session, project, id string,
			args []string,
		) (*http.Response, error) {
			return s.hub.RestoreVolume(ctx, project, id, client.VolumeRestore{SnapshotID: args[1]}, s.editors()...)
		}),
		a.volumeAction("delete VOLUME", "Delete a volume that no app instance has, with its snapshots",
			client.VolumeStatusDeleted, cobra.ExactArgs(1), func(ctx context.Context, s *session, project, id string,
				_ []string,
			) (*http.Response, error) {
				return s.hub.DeleteVolume(ctx, project, id, s.editors()...)
			}),
		a.snapshotVolume(), a.deleteSnapshot(), a.resizeVolume())
}

func (a *app) createVolume() *cobra.Command {
	var (
		body client.VolumeCreate
		wait bool
	)
	c := a.projectAction("create NAME", "Bind a volume to a node", cobra.ExactArgs(1), func(ctx context.Context,
		s *session, project string, args []string,
	) error {
		body.Name = args[0]
		v, err := client.Read[client.Volume](s.hub.CreateVolume(ctx, project, body, s.editors()...))
		if err == nil && wait {
			v, err = s.waitForVolume(ctx, project, v, client.VolumeStatusReady)
		}
		if err != nil {
			return err
		}
		return show(s, v, volumeColumns())
	})
	f := c.Flags()
	f.Int64Var(&body.SizeMib, "size-mib", 1024, "what it holds, in MiB")
	f.StringVar(&body.AllocationID, "allocation", "", "id of an allocation on the node that is to keep it (default: the "+
		"only node on which the project has one)")
	f.BoolVar(&wait, "wait", false, "wait until it is ready")
	return c
}

// volumeAction is a leaf about one volume; until is the status that --wait waits for, empty where there is nothing to
// wait for.
func (a *app) volumeAction(use, short string, until client.VolumeStatus, args cobra.PositionalArgs,
	call func(ctx context.Context, s *session, project, id string, args []string) (*http.Response, error),
) *cobra.Command {
	var wait bool
	c := a.projectAction(use, short, args, func(ctx context.Context, s *session, project string, args []string) error {
		id, err := s.volumeID(ctx, project, args[0])
		if err != nil {
			return err
		}
		v, err := client.Read[client.Volume](call(ctx, s, project, id, args))
		if err == nil && wait {
			v, err = s.waitForVolume(ctx, project, v, until)
		}
		if err != nil {
			return err
		}
		return show(s, v, volumeColumns())
	})
	if until != "" {
		c.Flags().BoolVar(&wait, "wait", false, "wait until it is "+string(until))
	}
	return c
}

// waitForVolume watches a volume until it has the status, and shows what the node lacks meanwhile.
func (s *session) waitForVolume(ctx context.Context, project string, v client.Volume, want client.VolumeStatus,
) (client.Volume, error) {
	for v.Status != want {
		switch v.Status { //nolint:exhaustive // the others may become what is waited for
		case client.VolumeStatusNodeLost:
			return v, fmt.Errorf("the node of volume %s is lost", v.Name)
		case client.VolumeStatusDeleted:
			return v, fmt.Errorf("the volume %s was deleted", v.Name)
		}
		s.progress.now(or(v.Detail, "waiting until the volume is "+string(want)))
		asked := time.Now()
		next, err := client.Read[client.Volume](s.hub.GetVolume(ctx, project, v.ID, &client.GetVolumeParams{
			After: v.ResourceVersion, Wait: volumeWait,
		}, s.editors()...))
		if err == nil && next.ResourceVersion == v.ResourceVersion && next.Status != want &&
			!loop.Pause(ctx, time.Until(asked.Add(volumePoll))) {
			err = ctx.Err()
		}
		if err != nil {
			return v, err
		}
		v = next
	}
	return v, nil
}

func (a *app) snapshotVolume() *cobra.Command {
	var (
		body client.VolumeSnapshotCreate
		wait bool
	)
	c := a.projectAction("snapshot VOLUME", "Copy a volume on its node", cobra.ExactArgs(1), func(ctx context.Context,
		s *session, project string, args []string,
	) error {
		id, err := s.volumeID(ctx, project, args[0])
		if err != nil {
			return err
		}
		made, err := client.Read[client.VolumeSnapshot](s.hub.CreateVolumeSnapshot(ctx, project, id, body, s.editors()...))
		for err == nil && wait && made.Status == client.VolumeSnapshotStatusPending {
			s.progress.now("waiting until the snapshot is ready")
			asked, before := time.Now(), made.ResourceVersion
			made, err = client.Read[client.VolumeSnapshot](s.hub.GetVolumeSnapshot(ctx, project, id, made.ID,
				&client.GetVolumeSnapshotParams{After: before, Wait: volumeWait}, s.editors()...))
			if err == nil && made.ResourceVersion == before && made.Status == client.VolumeSnapshotStatusPending &&
				!loop.Pause(ctx, time.Until(asked.Add(volumePoll))) {
				err = ctx.Err()
			}
		}
		if err != nil {
			return err
		}
		return show(s, made, snapshotColumns())
	})
	c.Flags().StringVar(&body.Description, "description", "", "what it is for")
	c.Flags().BoolVar(&wait, "wait", false, "wait until it is ready")
	return c
}

func (a *app) resizeVolume() *cobra.Command {
	var body client.VolumeResize
	c := a.volumeAction("resize VOLUME", "Make a volume larger, also while app instances use it", client.VolumeStatusReady,
		cobra.ExactArgs(1), func(ctx context.Context, s *session, project, id string, _ []string) (*http.Response, error) {
			return s.hub.ResizeVolume(ctx, project, id, body, s.editors()...)
		})
	c.Flags().Int64Var(&body.SizeMib, "size-mib", 0, "what it is to hold, in MiB")
	_ = c.MarkFlagRequired("size-mib")
	return c
}

func (a *app) deleteSnapshot() *cobra.Command {
	return a.projectAction("delete-snapshot VOLUME SNAPSHOT_ID", "Delete a snapshot of a volume", cobra.ExactArgs(2),
		func(ctx context.Context, s *session, project string, args []string) error {
			id, err := s.volumeID(ctx, project, args[0])
			if err != nil {
				return err
			}
			return showAnswer(s, snapshotColumns())(s.hub.DeleteVolumeSnapshot(ctx, project, id, args[1], s.editors()...))
		})
}

// volumeID returns the id of a volume that is named by its id or its name.
func (s *session) volumeID(ctx context.Context, project, want string) (string, error) {
	if isID(want) {
		return want, nil
	}
	volumes := func(cursor string) (*http.Response, error) {
		return s.hub.ListVolumes(ctx, project, &client.ListVolumesParams{Cursor: cursor, Limit: client.PageSize})
	}
	return only(want, "volume", volumes, func(v client.Volume) (string, bool) { return v.ID, v.Name == want })
}
