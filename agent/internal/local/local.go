// Package local is the agent's Unix socket: what the owner of the machine may see and do without any hub. It shows and
// passes on; it decides nothing. Who may open the socket is up to its file mode.
package local

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/internal/accept"
	"github.com/gpuaas/gpuaas/agent/internal/runtime"
	"github.com/gpuaas/gpuaas/agent/internal/state"
	"github.com/gpuaas/gpuaas/agent/policy"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

const (
	// readTimeout bounds a request's arrival; answers may take as long as a followed log.
	readTimeout = 10 * time.Second
	// maxDocumentBytes bounds what apply takes: an envelope and its parts in base64.
	maxDocumentBytes = 16 << 20
	// maxPinBytes bounds the name of an image.
	maxPinBytes  = 4 << 10
	shutdownWait = 2 * time.Second
)

// Status is the node at a glance.
type Status struct {
	NodeID        string              `json:"node_id"`
	AgentVersion  string              `json:"agent_version"`
	Incarnation   string              `json:"incarnation"`
	TrustDomain   string              `json:"trust_domain"`
	BundleVersion uint64              `json:"bundle_version"`
	Epoch         uint64              `json:"epoch"`
	Generation    uint64              `json:"generation"`
	Time          time.Time           `json:"time"`
	TimeTrusted   bool                `json:"time_trusted"`
	Conditions    []string            `json:"conditions"`
	Hub           agent.SessionStatus `json:"hub"`
	Usage         state.SpoolState    `json:"usage"`
	Workloads     int                 `json:"workloads"`
	// Unverified says, by key, why the agent set stored documents aside when it started.
	Unverified map[string]string `json:"unverified"`
}

// Workload is the current state of one member.
type Workload struct {
	MemberID    string     `json:"member_id"`
	InstanceID  string     `json:"instance_id"`
	Revision    uint64     `json:"revision"`
	Status      string     `json:"status"`
	Reason      string     `json:"reason,omitempty"`
	Detail      string     `json:"detail,omitempty"`
	Restarts    uint32     `json:"restarts"`
	StartedAt   time.Time  `json:"started_at,omitzero"`
	ReadyAt     time.Time  `json:"ready_at,omitzero"`
	LeaseNo     uint64     `json:"lease_no,omitempty"`
	LeaseEnds   time.Time  `json:"lease_ends,omitzero"`
	Endpoints   []Endpoint `json:"endpoints,omitempty"`
	RunIDs      []string   `json:"run_ids,omitempty"`
	AppSlug     string     `json:"app_slug,omitempty"`
	AppVersion  string     `json:"app_version,omitempty"`
	ImageDigest []string   `json:"images,omitempty"`
	// Services are those of a workload with several.
	Services []Service `json:"services,omitempty"`
}

// Service is the current state of one service of a member.
type Service struct {
	Name      string    `json:"name"`
	Status    string    `json:"status"`
	Reason    string    `json:"reason,omitempty"`
	Detail    string    `json:"detail,omitempty"`
	Restarts  uint32    `json:"restarts"`
	StartedAt time.Time `json:"started_at,omitzero"`
	ReadyAt   time.Time `json:"ready_at,omitzero"`
	ExitedAt  time.Time `json:"exited_at,omitzero"`
	ExitCode  int32     `json:"exit_code,omitempty"`
}

func servicesOf(x *protocol.WorkloadStatus) []Service {
	var out []Service
	for _, s := range x.GetServices() {
		out = append(out, Service{
			Name: s.GetName(), Status: s.GetStatus().Text(), Reason: s.GetReason().Text(), Detail: s.GetDetail(),
			Restarts: s.GetRestarts(), StartedAt: timeOf(s.GetStartedAt()), ReadyAt: timeOf(s.GetReadyAt()),
			ExitedAt: timeOf(s.GetExitedAt()), ExitCode: s.GetExitCode(),
		})
	}
	return out
}

func timeOf(t *timestamppb.Timestamp) time.Time {
	if t == nil {
		return time.Time{}
	}
	return t.AsTime()
}

// Endpoint is a published port on this machine.
type Endpoint struct {
	Name string `json:"name"`
	URL  string `json:"url"`
}

// Document is what apply takes: a DSSE envelope and, for a desired state, its parts.
type Document struct {
	Envelope json.RawMessage `json:"envelope"`
	Parts    [][]byte        `json:"parts,omitempty"`
}

// Applied is what apply answers when the document was accepted.
type Applied struct {
	Document   string `json:"document"`
	Epoch      uint64 `json:"epoch"`
	Generation uint64 `json:"generation"`
}

// problem is the answer when something did not work.
type problem struct {
	Code   fault.Code `json:"code"`
	Detail string     `json:"detail"`
}

// Reconciler reports the workloads; agent/internal/reconcile implements it.
type Reconciler interface {
	Report() agent.Report
}

// Session knows the state of the session to the hub; agent/internal/uplink implements it.
type Session interface {
	Status() agent.SessionStatus
}

// Acceptor verifies and stores documents; agent/internal/accept implements it.
type Acceptor interface {
	State(ctx context.Context, env *protocol.Envelope, parts [][]byte) (*protocol.Ack, error)
	Leases(env *protocol.Envelope) (*protocol.Ack, error)
	Bundle(env *protocol.Envelope) (*protocol.Ack, error)
	RefuseUnread(err error)
}

// Accelerators are those of the machine; agent/internal/accelerator implements it.
type Accelerators interface {
	Release(ctx context.Context, id string) error
}

// Images are those of the node; agent/internal/runtime implements it.
type Images interface {
	Images(ctx context.Context) ([]runtime.Image, error)
	PinImage(ctx context.Context, name string, pinned bool) error
}

// Server answers on the socket.
type Server struct {
	AgentVersion string
	Store        *state.Store
	Clock        *state.Clock
	Reconciler   Reconciler
	Session      Session
	Acceptor     Acceptor
	Accelerators Accelerators
	Images       Images
	// Logs reads the log of one container run.
	Logs func(ctx context.Context, runID string, tailLines int, follow bool) (io.ReadCloser, error)
	// Policy returns what the owner allows now; with an error, what was allowed before.
	Policy func() (policy.Policy, error)
	// Node is this node's identity in signed documents.
	Node func() protocol.NodeIdentity
	Log  *slog.Logger
}

// Listen makes the socket with this mode. It replaces a socket at the path: the caller holds the lock of the data
// directory, so that no other agent listens there.
func Listen(ctx context.Context, path string, mode os.FileMode) (net.Listener, error) {
	//nolint:gosec // containers' files below the run directory need the way
	if err := os.MkdirAll(filepath.Dir(path), 0o711); err != nil {
		return nil, unusable(path, err)
	}
	if info, err := os.Lstat(path); err == nil && info.Mode().Type() != os.ModeSocket {
		return nil, unusable(path, errors.New("there is another file"))
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, unusable(path, err)
	}
	l, err := new(net.ListenConfig).Listen(ctx, "unix", path)
	if err != nil {
		return nil, unusable(path, err)
	}
	if err := os.Chmod(path, mode); err != nil {
		return nil, errors.Join(unusable(path, err), l.Close())
	}
	return l, nil
}

func unusable(path string, err error) error {
	return fault.New(fault.Unavailable, codeSocketUnusable, fmt.Sprintf("The socket %s cannot be made: %v.", path, err),
		err)
}

// Serve answers until ctx ends.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	server := &http.Server{
		Handler: s.handler(), ReadHeaderTimeout: readTimeout, ReadTimeout: readTimeout,
		BaseContext: func(net.Listener) context.Context { return ctx },
	}
	stopped := make(chan error, 1)
	stop := context.AfterFunc(ctx, func() {
		last, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownWait)
		defer cancel()
		if err := server.Shutdown(last); err != nil {
			stopped <- server.Close()
			return
		}
		stopped <- nil
	})
	err := server.Serve(l)
	if stop() {
		return err // it ended by itself
	}
	if errors.Is(err, http.ErrServerClosed) {
		err = nil
	}
	return errors.Join(err, <-stopped)
}

func (s *Server) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/status", func(w http.ResponseWriter, _ *http.Request) { s.answer(w, s.status(), nil) })
	mux.HandleFunc("GET /v1/workloads", func(w http.ResponseWriter, _ *http.Request) { s.answer(w, s.workloads(), nil) })
	mux.HandleFunc("GET /v1/verify", func(w http.ResponseWriter, _ *http.Request) {
		// What fails here and runs keeps running, but is not restarted.
		checks, err := accept.Verify(s.Store, s.Node())
		s.answer(w, checks, err)
	})
	mux.HandleFunc("GET /v1/logs/{member}", s.logs)
	mux.HandleFunc("GET /v1/keys/{user}", func(w http.ResponseWriter, req *http.Request) {
		lines, err := s.keys(req.PathValue("user"))
		s.answer(w, lines, err)
	})
	mux.HandleFunc("POST /v1/apply", s.apply)
	mux.HandleFunc("GET /v1/images", func(w http.ResponseWriter, req *http.Request) {
		list, err := s.Images.Images(req.Context())
		s.answer(w, list, err)
	})
	mux.HandleFunc("POST /v1/images/pin", s.pin)
	mux.HandleFunc("POST /v1/accelerators/{id}/release", func(w http.ResponseWriter, req *http.Request) {
		s.answer(w, struct{}{}, s.Accelerators.Release(req.Context(), req.PathValue("id")))
	})
	return mux
}

// keys returns with which keys tenants log in to an account now. A state that does not verify at this moment, as its
// key was revoked or its file altered, lets nobody in.
func (s *Server) keys(user string) ([]string, error) {
	verified, err := accept.SignedState(s.Store, s.Node())
	if err != nil {
		return nil, err
	}
	if !verified.OK() {
		return []string{}, nil
	}
	rules, err := s.Policy()
	if err != nil {
		s.Log.Warn("the owner's policy has an error; the one before it is in force", slog.Any("error", err))
	}
	return agent.AuthorizedKeys(verified, rules, user, s.Clock.Now()), nil
}

// Pin names an image, and whether it stays where space is short.
type Pin struct {
	Name   string `json:"name"`
	Pinned bool   `json:"pinned"`
}

func (s *Server) pin(w http.ResponseWriter, req *http.Request) {
	var p Pin
	if err := json.NewDecoder(io.LimitReader(req.Body, maxPinBytes)).Decode(&p); err != nil {
		s.answer(w, nil, fault.New(fault.Malformed, codeUnreadable, "The request could not be read.", err))
		return
	}
	s.answer(w, p, s.Images.PinImage(req.Context(), p.Name, p.Pinned))
}

func (s *Server) answer(w http.ResponseWriter, body any, err error) {
	w.Header().Set("Content-Type", "application/json")
	if err != nil {
		w.WriteHeader(statusOf(err))
		body = problemOf(err)
	}
	if err := json.NewEncoder(w).Encode(body); err != nil {
		s.Log.Debug("cannot answer on the local socket", slog.Any("error", err))
	}
}

func problemOf(err error) problem {
	if r, is := errors.AsType[*protocol.RefusalError](err); is {
		return problem{fault.Code(r.Reason.Text()), r.Detail}
	}
	f := fault.As(err)
	return problem{f.Code, f.Public}
}

func statusOf(err error) int {
	if _, is := errors.AsType[*protocol.RefusalError](err); is {
		return http.StatusConflict
	}
	switch fault.As(err).Kind {
	case fault.NotFound:
		return http.StatusNotFound
	case fault.Malformed:
		return http.StatusBadRequest
	case fault.Conflict:
		return http.StatusConflict
	case fault.Unavailable:
		return http.StatusServiceUnavailable
	default:
		return http.StatusInternalServerError
	}
}

func (s *Server) status() Status {
	accepted, bundle, report := s.Store.Accepted(), s.Store.Bundle(), s.Reconciler.Report()
	return Status{
		NodeID: s.Store.NodeID(), AgentVersion: s.AgentVersion, Incarnation: s.Store.Incarnation(),
		TrustDomain: bundle.TrustDomain(), BundleVersion: bundle.Version(), Epoch: accepted.Epoch,
		Generation: accepted.Generation,
		Time:       s.Clock.Now(), TimeTrusted: s.Clock.Trusted(), Conditions: append([]string{}, report.Conditions...),
		Hub: s.Session.Status(), Usage: s.Store.Spool(), Workloads: len(accepted.Parts),
		Unverified: s.Store.Unverified(),
	}
}

func (s *Server) workloads() []Workload {
	leases, runs := s.Store.Leases(), s.Store.Runs()
	documents := make(map[string]*protocol.Workload)
	for _, p := range s.Store.Accepted().Parts {
		documents[p.MemberID] = p.Workload
	}
	out := []Workload{}
	for _, x := range s.Reconciler.Report().Workloads {
		w := Workload{
			MemberID: x.GetMemberId(), InstanceID: x.GetInstanceId(), Revision: x.GetRevision(), Status: x.GetStatus().Text(),
			Reason: x.GetReason().Text(), Detail: x.GetDetail(), Restarts: x.GetRestarts(),
			LeaseNo: leases[x.GetMemberId()].GetLeaseNo(),
			AppSlug: documents[x.GetMemberId()].GetAppSlug(), AppVersion: documents[x.GetMemberId()].GetAppVersion(),
			StartedAt: timeOf(x.GetStartedAt()), ReadyAt: timeOf(x.GetReadyAt()), Services: servicesOf(x),
		}
		if l := leases[x.GetMemberId()]; l != nil {
			w.LeaseEnds = l.GetExpiresAt().AsTime()
		}
		for _, e := range x.GetEndpoints() {
			w.Endpoints = append(w.Endpoints, Endpoint{
				Name: e.GetName(), URL: e.GetProtocol() + "://" + net.JoinHostPort(e.GetHost(), strconv.Itoa(int(e.GetPort()))),
			})
		}
		for _, svc := range documents[x.GetMemberId()].GetServices() {
			w.ImageDigest = append(w.ImageDigest, svc.GetImage())
		}
		for id, run := range runs {
			if run.MemberID == w.MemberID {
				w.RunIDs = append(w.RunIDs, id)
			}
		}
		out = append(out, w)
	}
	return out
}

func (s *Server) logs(w http.ResponseWriter, req *http.Request) {
	q := req.URL.Query()
	tail, err := strconv.Atoi(q.Get("tail"))
	if err != nil || tail < 1 || tail > runtime.MaxTailLines {
		s.answer(w, nil, fault.New(fault.Malformed, codeUnreadable, fmt.Sprintf("tail, the number of lines, must be 1 to %d.",
			runtime.MaxTailLines), err))
		return
	}
	run, err := s.Store.NewestRun(req.PathValue("member"), q.Get("service"))
	if err != nil {
		s.answer(w, nil, err)
		return
	}
	source, err := s.Logs(req.Context(), run.ID, tail, q.Get("follow") == "true")
	if err != nil {
		s.answer(w, nil, err)
		return
	}
	defer func() { _ = source.Close() }()
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	_, _ = io.Copy(flushing{w}, source)
}

// flushing sends each piece of a followed log at once.
type flushing struct{ w http.ResponseWriter }

func (f flushing) Write(p []byte) (int, error) {
	n, err := f.w.Write(p)
	if err == nil {
		err = http.NewResponseController(f.w).Flush()
	}
	return n, err
}

func (s *Server) apply(w http.ResponseWriter, req *http.Request) {
	accepted, err := s.accept(req)
	if err != nil {
		s.answer(w, nil, err)
		return
	}
	s.answer(w, Applied{
		Document: accepted.GetDocument().Text(), Epoch: accepted.GetEpoch(),
		Generation: accepted.GetGeneration(),
	}, nil)
}

func (s *Server) accept(req *http.Request) (*protocol.Ack, error) {
	d, env, err := readDocument(req)
	if err != nil {
		s.Acceptor.RefuseUnread(err)
		return nil, err
	}
	switch env.GetPayloadType() {
	case protocol.PayloadLeases:
		return s.Acceptor.Leases(env)
	case protocol.PayloadBundle:
		return s.Acceptor.Bundle(env)
	default:
		// Any other type is refused as a desired state, and the refusal is reported to the hub.
		return s.Acceptor.State(req.Context(), env, d.Parts)
	}
}

func readDocument(req *http.Request) (Document, *protocol.Envelope, error) {
	var d Document
	raw, err := io.ReadAll(io.LimitReader(req.Body, maxDocumentBytes+1))
	if err != nil {
		return d, nil, fault.New(fault.Malformed, codeUnreadable, "The document could not be read.", err)
	}
	if len(raw) > maxDocumentBytes {
		return d, nil, protocol.Refuse(protocol.Nack_TOO_LARGE, "the document has over %d bytes", maxDocumentBytes)
	}
	if err := json.Unmarshal(raw, &d); err != nil {
		return d, nil, protocol.Refuse(protocol.Nack_MALFORMED, "the document is not JSON")
	}
	env, err := protocol.EnvelopeFromJSON(d.Envelope)
	return d, env, err
}
