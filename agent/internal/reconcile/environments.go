package reconcile

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/url"
	"regexp"
	"slices"
	"strings"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/internal/runtime"
	"github.com/gpuaas/gpuaas/agent/internal/volume"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

const (
	// installLogLines and maxInstallLogBytes bound what the status of a failed installation quotes of its log.
	installLogLines    = 12
	maxInstallLogBytes = 1 << 10
	// maxLogEndBytes bounds what of the log is held in memory. It is much more than is quoted, so that a secret that is
	// cut at its beginning, and so not redacted, lies outside the quotation.
	maxLogEndBytes = 64 << 10
	// maxReportedBytes bounds all requirements of a report together.
	maxReportedBytes = 96 << 10
)

// prepareEnvironment gives a container the environment that it uses, or a directory to install one in.
func (r *Reconciler) prepareEnvironment(ctx context.Context, a agent.StartContainer, spec *runtime.Spec) error {
	s := a.Service
	if s.Environment == "" {
		return nil
	}
	if !s.BuildsEnvironment {
		dir, packages, err := r.machine.Environments.Use(ctx, s.Environment)
		spec.Packages = packages
		spec.Volumes = append(spec.Volumes, runtime.Volume{Dir: dir, Path: s.Spec.GetEnvironment().GetPath(), ReadOnly: true})
		return err
	}
	dir, err := r.machine.Environments.Begin(ctx, spec.ID, a.Workload.OrgID, s.Spec.GetEnvironment().GetSizeBytes(),
		r.usedEnvironments())
	spec.Environment = s.Environment
	spec.Volumes = append(spec.Volumes, runtime.Volume{Dir: dir, Path: s.Spec.GetEnvironment().GetPath()})
	return err
}

// usedEnvironments are those that the accepted state names, also for members that are stopped, with their orgs.
func (r *Reconciler) usedEnvironments() map[string]string {
	used := map[string]string{}
	for _, w := range r.acceptedWorkloads() {
		for _, id := range w.EnvironmentIDs() {
			used[id] = w.OrgID
		}
	}
	return used
}

// installedEnvironments are those of a report. An error is logged and reports none: the next report has them.
func (r *Reconciler) installedEnvironments() []*protocol.InstalledEnvironment {
	all, err := r.machine.Environments.List()
	if err != nil {
		r.log.Error("cannot list the environments of this node", slog.Any("error", err))
	}
	if len(all) == 0 {
		return nil
	}
	users := map[string][]string{}
	for _, w := range r.acceptedWorkloads() {
		ids := w.EnvironmentIDs()
		slices.Sort(ids)
		for _, id := range slices.Compact(ids) {
			users[id] = append(users[id], w.InstanceID)
		}
	}
	room := maxReportedBytes
	var out []*protocol.InstalledEnvironment
	for _, e := range all[:min(len(all), protocol.MaxEnvironments)] {
		project, digest := agent.ParseEnvironmentID(e.ID)
		one := &protocol.InstalledEnvironment{
			ProjectId: project,
			Digest:    digest,
			Image:     e.Image,
			SizeBytes: e.SizeBytes,
			BuiltAt:   timestamppb.New(e.BuiltAt),
			UsedAt:    timestamppb.New(e.UsedAt),
			UsedBy:    users[e.ID][:min(len(users[e.ID]), protocol.MaxEnvironmentUsers)],
		}
		for _, requirement := range e.Requirements {
			room -= len(requirement)
		}
		if room > 0 {
			one.Requirements = e.Requirements
		}
		out = append(out, one)
	}
	return out
}

// RemoveEnvironment removes an environment of a project that no workload of the accepted state names. What is not
// there is removed.
func (r *Reconciler) RemoveEnvironment(ctx context.Context, projectID, digest string) error {
	id := agent.EnvironmentID(projectID, digest)
	if _, is := r.usedEnvironments()[id]; is {
		return fault.New(fault.Conflict, agent.CodeEnvironmentInUse, "An app instance uses the environment.", nil)
	}
	err := r.machine.Environments.Delete(ctx, id)
	r.subscribers.Send()
	return err
}

// acceptedWorkloads are those of the accepted state, with their fallbacks.
func (r *Reconciler) acceptedWorkloads() []agent.Workload {
	var all []agent.Workload
	for _, p := range r.store.Accepted().Parts {
		if p.Workload == nil {
			continue
		}
		w := agent.NewWorkload(p.MemberID, p.Workload)
		if back := p.Workload.GetFallback(); back != nil {
			fallback := agent.NewWorkload(p.MemberID, back)
			w.Fallback = &fallback
		}
		all = append(all, w)
	}
	return all
}

// environments reports which environments of the desired workloads are installed.
func (r *Reconciler) environments(snap snapshot) map[string]bool {
	var have map[string]bool
	for _, w := range snap.desired.Workloads {
		for _, id := range w.EnvironmentIDs() {
			if have == nil {
				have = map[string]bool{}
			}
			have[id] = r.machine.Environments.Has(id)
		}
	}
	return have
}

// finishInstallation makes what a container has installed an environment before its exit is recorded, or says in its
// run why it is none. After a crash in between it does so again.
func (r *Reconciler) finishInstallation(ctx context.Context, a agent.RecordExit, l agent.Listed) error {
	if l.Environment == "" || l.Lost || !a.Unasked {
		return nil
	}
	w, builder := r.installationOf(a.MemberID, l.Environment)
	if builder == nil {
		return nil // it has left the state
	}
	if l.ExitCode == 0 {
		err := r.machine.Environments.Commit(ctx, l.ID, volume.Environment{
			ID: l.Environment, Image: builder.GetImage(), Requirements: builder.GetEnvironment().GetRequirements(),
			BuiltAt: r.clock.Now(),
		})
		if err == nil || !fault.IsPermanent(err) {
			return err
		}
		return r.installationFailed(l.ID, fault.As(err).Public)
	}
	return r.installationFailed(l.ID, fmt.Sprintf("pip ended with code %d: %s", l.ExitCode, r.installLog(ctx, w, l.ID)))
}

func (r *Reconciler) installationFailed(runID, why string) error {
	return r.store.UpdateRun(runID, func(run *agent.Run) { run.BuildFailed = why })
}

// installationOf finds the service that installs an environment for a member.
func (r *Reconciler) installationOf(memberID, environment string) (agent.Workload, *protocol.Service) {
	for _, w := range r.acceptedWorkloads() {
		if w.MemberID != memberID {
			continue
		}
		revisions := []agent.Workload{w}
		if w.Fallback != nil {
			revisions = append(revisions, *w.Fallback)
		}
		for _, revision := range revisions {
			for _, s := range revision.Services {
				if s.BuildsEnvironment && s.Environment == environment {
					return revision, s.Spec
				}
			}
		}
	}
	return agent.Workload{}, nil
}

// installLog is the end of what pip wrote, without the credentials of its index.
func (r *Reconciler) installLog(ctx context.Context, w agent.Workload, runID string) string {
	log, err := r.machine.Logs.Logs(ctx, runID, installLogLines, false)
	if err != nil {
		return "its log cannot be read"
	}
	defer func() { _ = log.Close() }()
	index, err := r.index(w)
	if err != nil {
		return "its log may hold the credentials of the package index" // which are not known here any more
	}
	var end logEnd
	_, _ = io.Copy(&end, log) // what was read is better than nothing
	text := urlCredentials.ReplaceAll(index.redact(end.text), []byte("://****@"))
	text = bytes.TrimSpace(text)
	return string(bytes.ToValidUTF8(text[max(0, len(text)-maxInstallLogBytes):], []byte("?")))
}

// urlCredentials are those in any URL: while an installation runs, its project may get an index with others.
var urlCredentials = regexp.MustCompile(`://[^\s/@]*@`)

// logEnd keeps the end of a log, one of whose lines may be as long as the log.
type logEnd struct{ text []byte }

// Write implements io.Writer.
func (e *logEnd) Write(p []byte) (int, error) {
	e.text = append(e.text, p...)
	if over := len(e.text) - maxLogEndBytes; over > 0 {
		e.text = slices.Delete(e.text, 0, over)
	}
	return len(p), nil
}

// packageIndex is the secret of a project that says where pip finds packages.
type packageIndex struct {
	url *url.URL
	// ca are certificates that it is trusted by; empty for those of the image.
	ca string
}

// index opens the package index of a workload; its zero value is pip's own default.
func (r *Reconciler) index(w agent.Workload) (packageIndex, error) {
	if len(w.SealedIndex) == 0 {
		return packageIndex{}, nil
	}
	secret, err := r.cfg.Unseal(w.MemberID, protocol.PackageIndexParameter, w.SealedIndex)
	if err != nil {
		return packageIndex{}, fault.New(fault.Unprocessable, agent.CodeSecretUnreadable, "The project's package index "+
			"was not sealed for this workload and node; upgrade the app instance to seal it anew.", err).Permanent()
	}
	address, ca, _ := strings.Cut(string(secret), "\n")
	parsed, err := url.Parse(address)
	if err != nil {
		return packageIndex{}, fault.New(fault.Unprocessable, agent.CodeSecretUnreadable, "The project's package index "+
			"is no URL.", nil).Permanent() // the error quotes it
	}
	return packageIndex{parsed, ca}, nil
}

// files configures pip for the index.
func (i packageIndex) files() map[string][]byte {
	if i.url == nil {
		return nil
	}
	text := "[global]\nindex-url = " + i.url.String() + "\n"
	if i.url.Scheme == "http" {
		text += "trusted-host = " + i.url.Host + "\n"
	}
	files := map[string][]byte{runtime.IndexFile: []byte(text)}
	if i.ca != "" {
		files[runtime.IndexCAFile] = []byte(i.ca)
	}
	return files
}

// redact removes the credentials in each form that pip, or a package's own build, may print.
func (i packageIndex) redact(text []byte) []byte {
	if i.url == nil || i.url.User == nil {
		return text
	}
	password, _ := i.url.User.Password()
	encoded := i.url.User.String()
	encodedName, encodedPassword, _ := strings.Cut(encoded, ":")
	if password == "" { // the name is a token
		password, encodedPassword = i.url.User.Username(), encodedName
	}
	for _, secret := range []string{encoded, password, encodedPassword} {
		if secret != "" {
			text = bytes.ReplaceAll(text, []byte(secret), []byte("****"))
		}
	}
	return text
}
