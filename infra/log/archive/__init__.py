"""The archive: closed ranges of topics as Parquet segments, so that a topic's retention can be short.

segment   one range of one partition as a file, and the record at which a damaged one breaks
filling   records into a segment
shelf     which segments a partition has, and where its history begins
archive   all shelves under one root: a directory, or a URI that every machine reaches
archiver  what is due, written
bus       topic and archive read as one history
"""
